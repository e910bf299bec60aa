"""What goes wrong in a fleet, and when: a plan that is drawn before a run and knows nothing of it.

So every policy of one seed meets the same faults at the same times. Parameters: `data/fault-model`,
section 7, columns *base* and *stress*; where that names an assumption, this is one. Each purpose
and engine has a random stream of its own.

Not modelled: requests that fail for reasons of their own (the same share for every policy), and
links between nodes (an engine is on one node here, and counts as a node for slow spells).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import log
from random import Random

from zerolayer.core.errors import ConfigError
from zerolayer.sim.noise import NoiseLevel

HOUR_S = 3600.0
DAY_S = 86_400.0
Z99 = 2.326
"""The 99th percentile of a standard normal distribution."""


class FaultKind(StrEnum):
    """What happens to an engine."""

    CRASH = "crash"
    """Its process ends."""
    HANG = "hang"
    """No step ends any more; its endpoint says that it is healthy."""
    FREEZE = "freeze"
    """Nothing happens for some seconds, then it goes on."""
    SPELL = "slow"
    """It is slower for some minutes."""
    OUTAGE = "outage"
    """Several engines end at once and stay away for minutes (a rack, a switch, a rollout)."""


@dataclass(frozen=True, slots=True)
class FaultLevel:
    """One column of the fault model. Rates are per second and engine."""

    prefill_deviation: float
    decode_deviation: float
    deviation_cut: float
    slow_machine_share: float
    slow_machine_factor: float
    one_slow_engine: float
    """One engine of the fleet is that much slower; 1 for none."""
    slow_start_share: float
    """Share of starts after which decoding is SLOW_START times slower until the next."""
    spell_rate: float
    spell_factor: tuple[float, float]
    freeze_rate: float
    freeze_s: tuple[float, float]
    hardware_per_gpu: float
    software_rate: float
    outage_rate: float
    """Per second, for the whole fleet."""
    noise: NoiseLevel


SLOW_START = 1.27
SPELL_MEAN_S = 600.0
HAZARD_SHAPE = 0.3
HANG_SHARE = 1.0 / 3.0
"""Of software failures."""
HANG_FOUND_S = (30.0, 600.0)
"""When a progress check ends a hanging engine: uniform in the logarithm. An assumption."""
HOST_LOST_SHARE = 0.1
"""Of hardware crashes: the host's memory, and snapshots in it, are gone too (Llama 3: host
maintenance is 8 % of interruptions, and a few more kinds take the host along)."""
OUTAGE_SHARE = (0.05, 0.25)
OUTAGE_S = (300.0, 3600.0)

NONE = FaultLevel(
    0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, (1.0, 1.0), 0.0, (0.0, 0.0), 0.0, 0.0, 0.0,
    NoiseLevel(0.0),
)  # fmt: skip
BASE = FaultLevel(
    prefill_deviation=0.03,
    decode_deviation=0.01,
    deviation_cut=0.10,
    slow_machine_share=0.005,
    slow_machine_factor=1.10,
    one_slow_engine=1.0,
    slow_start_share=0.0,
    spell_rate=1.0 / (87 * HOUR_S),
    spell_factor=(1.12, 1.28),
    freeze_rate=1.0 / HOUR_S,
    freeze_s=(0.7, 2.0),
    hardware_per_gpu=1.0 / (2000 * DAY_S) + 1.0 / (8 * 250 * DAY_S),
    software_rate=1.0 / (15 * DAY_S),
    outage_rate=1.0 / (30 * DAY_S),
    noise=NoiseLevel(0.02, 2e-5),
)
STRESS = FaultLevel(
    prefill_deviation=0.08,
    decode_deviation=0.08,
    deviation_cut=0.22,
    slow_machine_share=0.02,
    slow_machine_factor=1.2,
    one_slow_engine=1.5,
    slow_start_share=0.2,
    spell_rate=1.0 / HOUR_S,
    spell_factor=(1.3, 2.0),
    freeze_rate=1.0 / 300.0,
    freeze_s=(1.0, 12.0),
    hardware_per_gpu=100.0 * BASE.hardware_per_gpu,
    software_rate=100.0 * BASE.software_rate,
    outage_rate=1.0 / HOUR_S,
    noise=NoiseLevel(0.05, 2e-5),
)
LEVELS = {"none": NONE, "base": BASE, "stress": STRESS}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that will happen."""

    at_s: float
    kind: FaultKind
    engine: int
    seconds: float
    """How long it lasts: of crashes and outages, until a new process serves; of hangs the same,
    from the moment in which somebody ends the engine."""
    factor: float = 1.0
    """Slow spells: how much slower."""
    found_s: float = 0.0
    """Hangs: seconds until a progress check ends the engine."""
    host_lost: bool = False
    slow_start: float = 1.0
    """How much slower the next process decodes."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How much slower than nominal an engine is from the start."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What will happen to a fleet."""

    speeds: tuple[EngineSpeed, ...]
    slow_starts: tuple[float, ...]
    """Per engine: how much slower its first process decodes."""
    faults: tuple[Fault, ...]
    """In the order of time."""
    noise: NoiseLevel


@dataclass(frozen=True, slots=True)
class FleetShape:
    """What a plan is drawn for."""

    engines: int
    gpus: int
    """Per engine."""
    restart_s: tuple[float, float]
    """Median and 99th percentile of a restart."""


def level_of(name: str) -> FaultLevel:
    """A column by its name. Raises ConfigError for another."""
    level = LEVELS.get(name)
    if level is None:
        raise ConfigError("--faults", name, f"give one of {', '.join(LEVELS)}")
    return level


def plan_faults(name: str, shape: FleetShape, seed: int, horizon_s: float) -> FaultPlan:
    """Draw what happens until `horizon_s`. Raises ConfigError for an unknown name."""
    level = level_of(name)
    engines = range(shape.engines)
    odd = _rng(seed, "one slow engine", 0).randrange(shape.engines)
    speeds = tuple(_speed(level, seed, e, shape.gpus, e == odd) for e in engines)
    starts = tuple(_slow_start(level, _rng(seed, "first start", e)) for e in engines)
    faults = [fault for e in engines for fault in _of_engine(level, shape, seed, e, horizon_s)]
    faults += _outages(level, shape, seed, horizon_s)
    faults.sort(key=lambda fault: (fault.at_s, fault.engine, fault.kind))
    return FaultPlan(speeds, starts, tuple(faults), level.noise)


def _rng(seed: int, purpose: str, engine: int) -> Random:
    return Random(f"{seed}/{purpose}/{engine}")


def _speed(level: FaultLevel, seed: int, engine: int, gpus: int, odd: bool) -> EngineSpeed:
    """An engine runs at the pace of its slowest GPU."""
    rng = _rng(seed, "speed", engine)
    cut = level.deviation_cut
    prefill = max(_around_one(rng, level.prefill_deviation, cut) for _ in range(gpus))
    decode = max(_around_one(rng, level.decode_deviation, cut) for _ in range(gpus))
    slow = level.slow_machine_factor if rng.random() < level.slow_machine_share else 1.0
    if odd:
        slow = max(slow, level.one_slow_engine)
    return EngineSpeed(prefill * slow, decode * slow)


def _around_one(rng: Random, deviation: float, cut: float) -> float:
    return min(1.0 + cut, max(1.0 - cut, rng.gauss(1.0, deviation)))


def _slow_start(level: FaultLevel, rng: Random) -> float:
    return SLOW_START if rng.random() < level.slow_start_share else 1.0


def _of_engine(
    level: FaultLevel, shape: FleetShape, seed: int, engine: int, horizon_s: float
) -> Iterator[Fault]:
    """Everything that happens to one engine by itself."""
    hazard = _rng(seed, "hazard", engine).gammavariate(HAZARD_SHAPE, 1.0 / HAZARD_SHAPE)
    rng = _rng(seed, "spell", engine)
    for at_s in _times(rng, level.spell_rate * hazard, horizon_s):
        factor = rng.uniform(*level.spell_factor)
        yield Fault(at_s, FaultKind.SPELL, engine, rng.expovariate(1.0 / SPELL_MEAN_S), factor)
    rng = _rng(seed, "freeze", engine)
    for at_s in _times(rng, level.freeze_rate * hazard, horizon_s):
        yield Fault(at_s, FaultKind.FREEZE, engine, rng.uniform(*level.freeze_s))
    rng = _rng(seed, "hardware", engine)
    for at_s in _times(rng, level.hardware_per_gpu * shape.gpus * hazard, horizon_s):
        lost = rng.random() < HOST_LOST_SHARE
        start = _slow_start(level, rng)
        restart = _restart(rng, shape)
        yield Fault(at_s, FaultKind.CRASH, engine, restart, host_lost=lost, slow_start=start)
    rng = _rng(seed, "software", engine)
    for at_s in _times(rng, level.software_rate * hazard, horizon_s):
        hangs = rng.random() < HANG_SHARE
        start = _slow_start(level, rng)
        found_s = HANG_FOUND_S[0] * (HANG_FOUND_S[1] / HANG_FOUND_S[0]) ** rng.random()
        yield Fault(
            at_s, FaultKind.HANG if hangs else FaultKind.CRASH, engine, _restart(rng, shape),
            found_s=found_s, slow_start=start,
        )  # fmt: skip


def _outages(level: FaultLevel, shape: FleetShape, seed: int, horizon_s: float) -> list[Fault]:
    rng = _rng(seed, "outage", 0)
    faults = []
    for at_s in _times(rng, level.outage_rate, horizon_s):
        hit = max(1, round(rng.uniform(*OUTAGE_SHARE) * shape.engines))
        seconds = rng.uniform(*OUTAGE_S)
        for engine in sorted(rng.sample(range(shape.engines), hit)):
            faults.append(Fault(at_s, FaultKind.OUTAGE, engine, seconds, host_lost=True))
    return faults


def _times(rng: Random, rate: float, horizon_s: float) -> Iterator[float]:
    """A Poisson process. Draws between two times do not change the rest of the plan's streams."""
    at_s = 0.0
    while rate > 0.0:
        at_s += rng.expovariate(rate)
        if at_s > horizon_s:
            return
        yield at_s


def _restart(rng: Random, shape: FleetShape) -> float:
    """Seconds until a restarted engine serves: lognormal by median and 99th percentile."""
    median, p99 = shape.restart_s
    return rng.lognormvariate(log(median), log(p99 / median) / Z99)
