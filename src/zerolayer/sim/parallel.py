"""Many runs over several processes, each with its share of progress visible while it runs.

A worker is a fresh process (`spawn`) that gets one task at a time through its pipe and sends the
result back. It ends when the pipe closes, so none outlives the process that started it by more
than the run that it is at.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Self

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


class Simulators:
    """Processes that do runs, kept between one list of tasks and the next.

    With one job, runs are done in this process. Use it as a context manager: its end ends the
    processes, also in the middle of a run.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._workers: dict[Connection, _Worker] = {}
        self._shares: Any = None

    def __enter__(self) -> Self:
        if self._jobs > 1:
            context = get_context("spawn")
            self._shares = context.RawArray("d", self._jobs)
            for slot in range(self._jobs):
                worker = _Worker(context, self._shares, slot)
                self._workers[worker.pipe] = worker
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(END_S)
        self._workers.clear()

    def work(self, tasks: Sequence[RunTask], watch: Watch) -> Iterator[tuple[int, RunResult]]:
        """Every task's number and result, in the order in which they end.

        Raises SimulationError when a run was refused in its process, or the process ended.
        """
        if self._workers:
            yield from self._work(tasks, watch)
            return
        for number, task in enumerate(tasks):
            yield number, simulate(task, _beyond(number, watch))
            watch(number + 1)

    def _work(self, tasks: Sequence[RunTask], watch: Watch) -> Iterator[tuple[int, RunResult]]:
        waiting = list(enumerate(tasks))[::-1]
        busy: list[Connection] = []
        for pipe in self._workers:
            if waiting:
                pipe.send(waiting.pop())
                busy.append(pipe)
        done = 0
        while busy:
            ready = set(connection.wait(busy, POLL_S))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                number, result = self._workers[pipe].answer()
                if waiting:
                    pipe.send(waiting.pop())
                else:
                    busy.remove(pipe)
                done += 1
                yield number, result
            watch(done + sum(self._shares))


def _beyond(done: int, watch: Watch) -> Watch:
    return lambda share: watch(done + share)


class _Worker:
    """A process and this end of its pipe."""

    def __init__(self, context: Any, shares: Any, slot: int) -> None:
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, shares, slot), daemon=True
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


def _serve(pipe: Connection, shares: Any, slot: int) -> None:
    """A worker's life: `shares[slot]` is how much of its run it has done. Ctrl-C is its parent's
    to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def progress(share: float) -> None:
        shares[slot] = share

    with suppress(EOFError, ConnectionError):
        while True:
            number, task = pipe.recv()
            try:
                answer = simulate(task, progress)
            except ZeroLayerError as error:
                pipe.send((number, str(error)))
            else:
                shares[slot] = 0.0
                pipe.send((number, answer))
