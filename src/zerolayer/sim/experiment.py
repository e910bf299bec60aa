"""All cells of a plan: runs in parallel, and of each cell its report alone is kept."""

from collections.abc import Callable, Generator

from zerolayer.sim.parallel import RunTask, Simulators
from zerolayer.sim.plan import Plan
from zerolayer.sim.results import RunResult
from zerolayer.sim.series import CellReport, cell_report

Watch = Callable[[float, str], None]
"""Gets the number of runs done (with parts of runs), and what is at work now."""


def run_count(plan: Plan) -> int:
    """How many runs a plan has."""
    return len(plan.cells()) * len(plan.policies) * plan.seeds


def simulate_plan(plan: Plan, jobs: int, watch: Watch) -> Generator[CellReport, None, None]:
    """The report of each cell as soon as its runs are done. Close it to end early.

    Raises ConfigError before the first run for what cannot be simulated, and SimulationError for a
    run that failed.
    """
    plan.check()
    tasks: list[RunTask] = []
    places: list[tuple[int, int]] = []
    for at, cell in enumerate(plan.cells()):
        for policy, runs in enumerate(plan.tasks(cell)):
            tasks += runs
            places += [(at, policy)] * len(runs)
    kept: list[list[list[RunResult]]] = [[[] for _ in plan.policies] for _ in plan.cells()]
    size = len(plan.policies) * plan.seeds
    titles = [f"{cell.trace} {cell.utilisation:.0%} {cell.faults}" for cell in plan.cells()]
    current = 0

    def look(done: float) -> None:
        watch(done, titles[min(current, len(titles) - 1)])

    with Simulators(min(jobs, len(tasks))) as simulators:
        for number, result in simulators.work(tasks, look):
            at, policy = places[number]
            kept[at][policy].append(result)
            while current < len(kept) and sum(map(len, kept[current])) == size:
                yield cell_report(kept[current])
                kept[current] = []
                current += 1
