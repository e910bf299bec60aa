"""Engines on a virtual clock, with the noise and the faults of a small busy box.

What an engine does is decided by its seed and its orders alone; the detector sees it as it would
see a real one: through its board, its process state and its CPU time.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from zerolayer.dispatch.cost import StepCostModel, StepWork
from zerolayer.dispatch.steps import StepSample, StepWatch
from zerolayer.stitch.stall import EngineEvidence, Phase, StallConfig, StallDetector, Verdict

MS = 1_000_000
SECOND = 1_000 * MS
CHUNK_TOKENS = 2_048
DECODES_MAX = 16
CORES = 2.0


@dataclass
class VirtualStream:
    """One stream inside an engine."""

    prompt_left: int
    output_left: int
    context: int = 0


@dataclass
class VirtualEngine:
    """An engine that batches streams. Orders: `stopped`, `spinning`, `asleep`, `slow_factor`,
    `gone`, `hungry` (gets a tenth of a core), `crowd` (programs on each of its cores beside it)."""

    rng: random.Random
    step_s: float = 0.05
    prefill_s_per_token: float = 0.0015
    noise: float = 0.15
    contention: Callable[[int], float] = lambda now_ns: 1.0
    stopped: bool = False
    spinning: bool = False
    asleep: bool = False
    gone: bool = False
    hungry: bool = False
    slow_factor: float = 1.0
    crowd: float = 0.0
    waits_told: bool = True
    slow_sleeps: bool = False
    streams: list[VirtualStream] = field(default_factory=list)
    seq: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    ends_ns: int = 0
    work: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))
    last_output_ns: int = 0
    cpu_ns: float = 0.0
    waited_ns: float = 0.0
    now_ns: int = 0
    done: int = 0

    def place(self, prompt: int, output: int) -> None:
        self.streams.append(VirtualStream(prompt, output))

    def advance(self, now_ns: int) -> None:
        """Run up to `now_ns`."""
        elapsed_ns = now_ns - self.now_ns
        crowded = self.runnable and not self.gone
        waits_ns = int(elapsed_ns * self.crowd / (1.0 + self.crowd)) if crowded else 0
        self.ends_ns += waits_ns if self.started_ns else 0
        self.waited_ns += waits_ns
        if self.gone or self.stopped or self.asleep or self.spinning or self.hungry:
            self.ends_ns += elapsed_ns
            busy = 1.0 if self.spinning else 0.1 if self.hungry else 0.0
        else:
            busy = self._run_until(now_ns)
        self.cpu_ns += busy * (elapsed_ns - waits_ns)
        self.now_ns = now_ns

    def _run_until(self, now_ns: int) -> float:
        at_ns = self.now_ns
        while True:
            if self.started_ns == 0:
                if not self.streams:
                    return 0.0
                self._begin(at_ns)
            if self.ends_ns > now_ns:
                return 0.0 if self._sleeps(now_ns) else CORES / self.contention(now_ns)
            at_ns = self.ends_ns
            self._end(at_ns)

    def _sleeps(self, now_ns: int) -> bool:
        """A slow engine that sleeps computes for its usual time first."""
        computes_ns = (self.ends_ns - self.started_ns) / self.slow_factor
        return self.slow_sleeps and now_ns - self.started_ns > computes_ns

    @property
    def runnable(self) -> bool:
        if self.spinning or self.hungry:
            return True
        return self.started_ns > 0 and not (
            self.asleep or self.stopped or self._sleeps(self.now_ns)
        )

    def _begin(self, at_ns: int) -> None:
        room, prefill, decodes, context = CHUNK_TOKENS, 0, 0, 0
        for stream in self.streams[:DECODES_MAX]:
            context += stream.context
            if stream.prompt_left == 0:
                decodes += 1
            else:
                take = min(room, stream.prompt_left)
                room -= take
                prefill += take
                stream.prompt_left -= take
                stream.context += take
        self.work = StepWork(prefill, decodes, context)
        seconds = self.step_s + prefill * self.prefill_s_per_token + 0.0004 * decodes
        seconds *= self.rng.lognormvariate(0.0, self.noise) * self.contention(at_ns)
        self.seq += 1
        self.started_ns = max(1, at_ns)
        self.ends_ns = at_ns + int(seconds * self.slow_factor * 1e9)

    def _end(self, at_ns: int) -> None:
        self.ended_ns, self.started_ns = at_ns, 0
        self.last_output_ns = at_ns + 2 * MS
        for stream in self.streams[:DECODES_MAX]:
            if stream.prompt_left == 0:
                stream.output_left -= 1
                stream.context += 1
        self.done += sum(stream.output_left <= 0 for stream in self.streams)
        self.streams = [stream for stream in self.streams if stream.output_left > 0]


@dataclass
class Seen:
    """A verdict and when it was given."""

    at_ns: int
    verdict: Verdict


class VirtualFleet:
    """Engines, their cost models and the detector above them, ticked together."""

    def __init__(
        self,
        engines: list[VirtualEngine],
        config: StallConfig | None = None,
        tick_ns: int = 20 * MS,
    ) -> None:
        self.engines = engines
        self.detector = StallDetector(config or StallConfig())
        self.models = [StepCostModel() for _ in engines]
        self.watches = [StepWatch() for _ in engines]
        self.now_ns = SECOND
        self.tick_ns = tick_ns
        self.log: list[Seen] = []
        self.always_owing: frozenset[int] = frozenset()
        self.before_tick: Callable[[int], None] = lambda now_ns: None
        self.arrivals: deque[tuple[int, int, int, int]] = deque()  # (at_ns, engine, prompt, output)
        for engine in engines:
            engine.now_ns = self.now_ns

    def run(
        self, seconds: float, then: Callable[["VirtualFleet"], bool] = lambda fleet: False
    ) -> None:
        """Tick for `seconds`, or until `then` is true after a tick."""
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns and not then(self):
            self.tick(self.tick_ns)

    def tick(self, after_ns: int) -> list[Verdict]:
        self.now_ns += after_ns
        while self.arrivals and self.arrivals[0][0] <= self.now_ns:
            _, engine, prompt, output = self.arrivals.popleft()
            self.engines[engine].place(prompt, output)
        self.before_tick(self.now_ns)
        evidence = {slot: self._evidence(slot) for slot in range(len(self.engines))}
        verdicts = self.detector.tick(self.now_ns, evidence)
        self.log += [Seen(self.now_ns, verdict) for verdict in verdicts]
        return verdicts

    def of(self, kind: type) -> list[Seen]:
        """What was said of one kind."""
        return [seen for seen in self.log if isinstance(seen.verdict, kind)]

    def _evidence(self, slot: int) -> EngineEvidence:
        engine, model = self.engines[slot], self.models[slot]
        engine.advance(self.now_ns)
        work = engine.work
        sample = StepSample(self.now_ns, engine.seq, engine.started_ns, work, engine.ended_ns)
        finished = self.watches[slot].sample(sample)
        if finished is not None and self.detector.phase(slot) is not Phase.COMMITTED:
            model.observe(finished.work, finished.seconds)
        expected_s = model.expected_s(
            work.prefill_tokens, work.decode_requests, work.context_tokens
        )
        return EngineEvidence(
            now_ns=self.now_ns,
            owes_work=bool(engine.streams) or slot in self.always_owing,
            step_seq=engine.seq,
            step_started_ns=engine.started_ns,
            prefill_tokens=work.prefill_tokens,
            decode_requests=work.decode_requests,
            context_tokens=work.context_tokens,
            expected_ns=int(expected_s * 1e9),
            last_output_ns=engine.last_output_ns,
            process_gone=engine.gone,
            stopped=engine.stopped,
            cpu_ns=int(engine.cpu_ns),
            runnable=engine.runnable,
            streams=len(engine.streams),
            step_ended_ns=engine.ended_ns,
            waited_ns=int(engine.waited_ns) if engine.waits_told else 0,
        )
