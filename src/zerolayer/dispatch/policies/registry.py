"""Every policy by name, with its formula in a line, its origin, and what its system does with a
stream whose engine is lost.

`simulate`, `tune` and the bench choose from here. What the others do was read from their code and
seen in runs (docs of the comparison name versions and figures).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from zerolayer.core.errors import ConfigError
from zerolayer.core.ports import Rng
from zerolayer.dispatch.entropy import Variant
from zerolayer.dispatch.policies.base import Policy
from zerolayer.dispatch.policies.dynamo_kv import DynamoKv
from zerolayer.dispatch.policies.entropy_source import EntropyOnly
from zerolayer.dispatch.policies.expected_wait import ExpectedWait
from zerolayer.dispatch.policies.least_requests import LeastRequests
from zerolayer.dispatch.policies.llmd_scorers import LlmdScorers
from zerolayer.dispatch.policies.power_of_two import PowerOfTwo
from zerolayer.dispatch.policies.round_robin import RoundRobin
from zerolayer.dispatch.policies.smg_least_load import SmgLeastLoad
from zerolayer.dispatch.policies.uniform_random import UniformRandom
from zerolayer.dispatch.policies.vllm_dp import VllmDataParallel
from zerolayer.dispatch.policies.weighted_round_robin import WeightedRoundRobin
from zerolayer.dispatch.policies.zerolayer import Weights, ZeroLayer


class Continuation(StrEnum):
    """What becomes of a stream whose engine is lost."""

    SNAPSHOT = "snapshot"
    """It goes on from its KV pages on another engine."""
    REPREFILL = "reprefill"
    """It goes on after its context was computed again."""
    RETRY = "retry"
    """It breaks; the client asks again from the start."""


class MakePolicy(Protocol):
    """Builds a fresh policy."""

    def __call__(self, rng: Rng, weights: Weights | None = None) -> Policy:
        """`rng`: the policy's own chance. `weights`: for `zerolayer`; others do not have any."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One way to choose, and the system that does so."""

    name: str
    formula: str
    origin: str
    make: MakePolicy
    continuation: Continuation


def policy_entry(name: str) -> PolicyEntry:
    """The entry of that name. Raises ConfigError that lists all names."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError("policy", name, f"write one of: {', '.join(POLICIES)}") from None


def _plain(make: Callable[[], Policy]) -> MakePolicy:
    def made(rng: Rng, weights: Weights | None = None) -> Policy:
        return make()

    return made


def _by_chance(make: Callable[[Rng], Policy]) -> MakePolicy:
    def made(rng: Rng, weights: Weights | None = None) -> Policy:
        return make(rng)

    return made


def _zerolayer(rng: Rng, weights: Weights | None = None) -> Policy:
    return ZeroLayer(weights)


_ENTRIES = (
    PolicyEntry(
        "round_robin", "every engine in turn", "yardstick",
        _plain(RoundRobin), Continuation.RETRY,
    ),
    PolicyEntry(
        "random", "any engine with the same chance", "yardstick",
        _by_chance(UniformRandom), Continuation.RETRY,
    ),
    PolicyEntry(
        "least_requests", "fewest streams", "yardstick (nginx least_conn)",
        _plain(LeastRequests), Continuation.RETRY,
    ),
    PolicyEntry(
        "power_of_two", "the one with fewer streams of two at random",
        "vllm-router, SMG; Mitzenmacher 2001", _by_chance(PowerOfTwo), Continuation.RETRY,
    ),
    PolicyEntry(
        "vllm_dp", "streams + waiting * 6 * max(0, kv - 0.5)",
        "vLLM 0.32 data parallel, v1/engine/core_client.py",
        _plain(VllmDataParallel), Continuation.RETRY,
    ),
    PolicyEntry(
        "smg_least_load", "queued tokens / throughput + 0.15 s * kv / (1 - kv)",
        "SMG, model_gateway/src/policies/least_load.rs",
        _plain(SmgLeastLoad), Continuation.RETRY,
    ),
    PolicyEntry(
        "dynamo_kv", "prefill blocks without prefix hits + decode blocks",
        "NVIDIA Dynamo, lib/kv-router/src/scheduling/selector",
        _by_chance(DynamoKv), Continuation.REPREFILL,
    ),
    PolicyEntry(
        "llmd_scorers", "2 * free queue + 2 * free kv + 3 * prefix held",
        "llm-d inference scheduler, pkg/epp/config/loader/defaults.go",
        _by_chance(LlmdScorers), Continuation.RETRY,
    ),
    PolicyEntry(
        "weighted_round_robin", "turns in proportion to static weights",
        "the source's legacy router", _plain(WeightedRoundRobin), Continuation.RETRY,
    ),
    PolicyEntry(
        "entropy_source", "min abs(E after - E now), E = 0.6 std(util) + 0.3 std(mem) + 0.1 cov",
        "the source", _plain(EntropyOnly), Continuation.SNAPSHOT,
    ),
    PolicyEntry(
        "entropy", "min E after, the same E", "the source's objective, its new value (mission, P2)",
        _plain(lambda: EntropyOnly(Variant.NEW)), Continuation.SNAPSHOT,
    ),
    PolicyEntry(
        "expected_wait", "expected seconds to the first token", "Zero-Layer's first dispatcher",
        _plain(ExpectedWait), Continuation.SNAPSHOT,
    ),
    PolicyEntry(
        "zerolayer", "least added squares of utilisation and KV, and the stream's own wait",
        "Zero-Layer", _zerolayer, Continuation.SNAPSHOT,
    ),
)  # fmt: skip

POLICIES: Mapping[str, PolicyEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
