"""Many runs over several processes, each with its share of progress visible while it runs.

A worker is a fresh process (`spawn`) that gets one task at a time through its pipe and sends the
result back. It ends when the pipe closes, so none outlives the process that started it by more
than the run that it is at.
"""

import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from zerolayer.core.errors import SimulationError, ZeroLayerError
from zerolayer.dispatch.policies.zerolayer import Weights
from zerolayer.sim.capacity import capacity, fitting
from zerolayer.sim.profiles import EngineKind, profile_of
from zerolayer.sim.results import RunKey, RunResult
from zerolayer.sim.run import RunSpec, run
from zerolayer.sim.traces import Trace, load_trace

POLL_S = 0.2
"""How often progress is looked at while nothing ends."""
END_S = 5.0
"""Seconds that a worker has to end after it was told to."""

Watch = Callable[[float], None]
"""Gets the number of runs that are done, with the parts of those that are under way."""


@dataclass(frozen=True, slots=True)
class RunTask:
    """One run, in words short enough to be sent: the trace is loaded where it is needed."""

    trace: str
    """A name or a file."""
    requests: int
    """The first so many; 0 for all."""
    key: RunKey
    kind: EngineKind
    weights: Weights | None = None


def simulate(task: RunTask, progress: Callable[[float], None] | None = None) -> RunResult:
    """Do one run here. Raises ConfigError for a trace, policy, kind or fault level that is not
    there."""
    trace, one = prepared(task.trace, task.requests, task.kind)
    rate = task.key.utilisation * task.key.engines * one
    return run(RunSpec(trace, task.key, task.kind, rate, task.weights), progress)


@lru_cache(maxsize=2)
def prepared(name: str, requests: int, kind: EngineKind) -> tuple[Trace, float]:
    """A trace without what does not fit into an engine, and what one engine sustains of it in
    requests per second. The runs of a cell come in a row, so two are kept."""
    trace = fitting(load_trace(name), kind)
    if requests:
        trace = trace.head(requests)
    return trace, capacity(profile_of(kind), trace)


def simulate_all(
    tasks: Sequence[RunTask], jobs: int, watch: Watch
) -> Generator[tuple[int, RunResult], None, None]:
    """Every task's number and result, in the order in which they end.

    Close the generator to end the workers early. Raises SimulationError when a run was refused or
    its process ended.
    """
    if jobs == 1 or len(tasks) == 1:
        for number, task in enumerate(tasks):
            yield number, simulate(task, _beyond(number, watch))
            watch(number + 1)
        return
    context = get_context("spawn")
    shares = context.RawArray("d", len(tasks))
    crew = _Crew([_Worker(context, shares) for _ in range(min(jobs, len(tasks)))])
    try:
        for number, result in crew.work(tasks, lambda: watch(sum(shares))):
            shares[number] = 1.0
            yield number, result
    finally:
        crew.end()


def _beyond(done: int, watch: Watch) -> Watch:
    return lambda share: watch(done + share)


class _Worker:
    """A process and this end of its pipe."""

    def __init__(self, context: Any, shares: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, shares), daemon=True
        )
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[int, RunResult]:
        """What it sent. Raises SimulationError."""
        try:
            number, result = self.pipe.recv()
        except (EOFError, ConnectionError) as cause:
            self.process.join(END_S)
            raise SimulationError(
                f"a simulating process ended by itself (status {self.process.exitcode}); if "
                "memory ran out, take fewer --jobs or --requests"
            ) from cause
        if isinstance(result, str):
            raise SimulationError(result)
        return number, result


class _Crew:
    """Hands tasks to workers as they become free."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = {worker.pipe: worker for worker in workers}

    def work(
        self, tasks: Sequence[RunTask], look: Callable[[], None]
    ) -> Iterator[tuple[int, RunResult]]:
        """See `simulate_all`. `look` is called every POLL_S and after each result."""
        waiting = list(enumerate(tasks))[::-1]
        busy: list[Connection] = []
        for pipe in self._workers:
            if waiting:
                pipe.send(waiting.pop())
                busy.append(pipe)
        while busy:
            for pipe in connection.wait(busy, POLL_S):
                assert isinstance(pipe, Connection)
                number, result = self._workers[pipe].answer()
                if waiting:
                    pipe.send(waiting.pop())
                else:
                    busy.remove(pipe)
                yield number, result
            look()

    def end(self) -> None:
        """End every worker, also one in the middle of a run."""
        for worker in self._workers.values():
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(END_S)


def _serve(pipe: Connection, shares: Any) -> None:
    """A worker's life. Ctrl-C is its parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        while True:
            number, task = pipe.recv()

            def progress(share: float, at: int = number) -> None:
                shares[at] = share

            try:
                pipe.send((number, simulate(task, progress)))
            except ZeroLayerError as error:
                pipe.send((number, str(error)))
