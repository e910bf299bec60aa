"""`bench offload`: an engine turns slower and slower under streams, with offload and without it.

Rounds alternate between a fleet that moves streams on its own (`--offload`, the default) and the
same one that does not. In each round an engine's steps are stretched by the chaos board, by one
factor after the other, all below what the stall detector takes for a stall; what is compared is
each stream's worst silence from the first factor on, and how long it took to its end.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rich.console import Console

from zerolayer.bench import chaos_signals
from zerolayer.bench.compare import compare, gaps_ms, percentile, summary
from zerolayer.bench.fleet_process import SERVED_NAME, FleetOptions, FleetProcess
from zerolayer.bench.narration import lines_on
from zerolayer.bench.prompts import prompt_of
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt
from zerolayer.core.errors import ConfigError

#: The engine is slowed once every stream has so many tokens: its step times are learned by then.
FIRST_TOKENS = 30
SLOW_ENGINE = "e1"
BEGIN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class OffloadOptions:
    """What to measure."""

    model: str
    rounds: int = 3
    """With offload and as many without, in turns; each starts a fleet of its own."""
    streams: int = 6
    tokens: int = 250
    """Of each answer."""
    context: int = 100
    """Prompt tokens."""
    factors: tuple[int, ...] = (2, 3, 4, 5)
    """How many times longer each step takes, one after the other."""
    seconds_each: float = 3.0
    """For so long; the last factor stays."""
    seed: int = 0

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        for name, value, least in (
            ("rounds", self.rounds, 1), ("streams", self.streams, 2),
            ("tokens", self.tokens, 2 * FIRST_TOKENS), ("context", self.context, 1),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"--{name}", value, f"give at least {least}")
        if not self.factors or min(self.factors) < 2:
            raise ConfigError("--factors", self.factors, "give numbers of 2 or more")


@dataclass
class Side:
    """What was seen with offload, or without."""

    gaps_ms: list[float] = field(default_factory=list)
    """The worst of each stream from the first factor on."""
    round_worst_ms: list[float] = field(default_factory=list)
    """The worst of all streams of each round: half of them are on the engine that turns slow."""
    itl_ms: list[float] = field(default_factory=list)
    """All gaps from then on."""
    stream_s: list[float] = field(default_factory=list)
    """From the first factor to each stream's end."""
    moves: list[dict[str, Any]] = field(default_factory=list)
    """As the status has them."""
    broken: int = 0
    lost: int = 0
    repeated: int = 0

    def figures(self) -> dict[str, Any]:
        p99 = percentile(self.itl_ms, 0.99)
        return {
            "worst_gap_ms": summary(self.round_worst_ms),
            "worst_gap_of_each_stream_ms": summary(self.gaps_ms),
            "token_gap_p99_ms": round(p99, 1) if p99 is not None else None,
            "seconds_to_end": summary(self.stream_s, 2),
            "moves": len(self.moves),
            "moves_by_reason": dict(Counter(str(move["reason"]) for move in self.moves)),
            "move_gap_ms": summary([move["gap_ms"] for move in self.moves]),
            "after_declared_ms": summary([move["after_declared_ms"] for move in self.moves]),
        }


def run_offload(options: OffloadOptions, console: Console) -> dict[str, Any]:
    """Measure; returns the result."""
    options.check()
    say, began = lines_on(console), time.monotonic()
    sides = {True: Side(), False: Side()}
    references: dict[int, list[int]] = {}
    for number in range(2 * options.rounds):
        offload = number % 2 == 0
        words = ("--offload",) if offload else ("--no-offload",)
        with FleetProcess(FleetOptions(options.model, serve_args=words), say) as fleet:
            measured = _Round(options, fleet, references, sides[offload])
            asyncio.run(measured.run())
        gap = sides[offload].round_worst_ms[-1]
        say(f"round {number + 1}/{2 * options.rounds} {words[0]}: worst gap {gap:.0f} ms")
    return {**compared(sides), "seed": options.seed,
            "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def compared(sides: dict[bool, Side]) -> dict[str, Any]:
    """Both sides (True: with offload), and the ratio of the medians of their rounds' worst
    gaps."""
    both = list(sides.values())
    medians = [percentile(sides[on].round_worst_ms, 0.5) for on in (True, False)]
    ratio = medians[0] / medians[1] if medians[0] and medians[1] else None
    return {
        "with_offload": sides[True].figures(),
        "without_offload": sides[False].figures(),
        "worst_gap_ratio": round(ratio, 3) if ratio is not None else None,
        "broken": sum(side.broken for side in both),
        "tokens_lost": sum(side.lost for side in both),
        "tokens_repeated": sum(side.repeated for side in both),
    }


class _Round:
    """One fleet, one load, one engine that turns slow."""

    def __init__(
        self,
        options: OffloadOptions,
        fleet: FleetProcess,
        references: dict[int, list[int]],
        side: Side,
    ) -> None:
        """`references`: token ids by stream, of the first round; filled there."""
        self._options = options
        self._fleet = fleet
        self._references = references
        self._side = side

    async def run(self) -> None:
        options, rng = self._options, Random(self._options.seed)
        async with StreamClient(self._fleet.base_url, SERVED_NAME) as client:
            records = [StreamRecord() for _ in range(options.streams)]
            begun = asyncio.Event()

            def on_tokens(_record: StreamRecord) -> None:
                if all(record.tokens >= FIRST_TOKENS for record in records):
                    begun.set()

            requests = [
                self._request(await prompt_of(client.tokenize, rng, options.context), on_tokens)
                for _ in records
            ]
            async with asyncio.TaskGroup() as group:
                streams = [
                    group.create_task(client.run(request, record))
                    for request, record in zip(requests, records, strict=True)
                ]
                async with asyncio.timeout(BEGIN_TIMEOUT_S):
                    await begun.wait()
                slowed_ns = time.monotonic_ns()
                slowing = group.create_task(self._slow_down())
                await asyncio.gather(*streams)
                slowing.cancel()
            status = await client.status()
        self._note(records, slowed_ns, status)

    def _request(
        self, prompt: list[int], on_tokens: Callable[[StreamRecord], None]
    ) -> StreamRequest:
        return StreamRequest(
            {
                "prompt": prompt, "max_tokens": self._options.tokens, "temperature": 0,
                "ignore_eos": True, "cache_salt": cold_salt(),
            },
            on_tokens=on_tokens,
        )  # fmt: skip

    async def _slow_down(self) -> None:
        for factor in self._options.factors:
            slot = int(SLOW_ENGINE[1:])
            chaos_signals.order(self._fleet.runtime(), slot, "slow", float(factor))
            await asyncio.sleep(self._options.seconds_each)

    def _note(self, records: list[StreamRecord], slowed_ns: int, status: dict[str, Any]) -> None:
        side = self._side
        for number, record in enumerate(records):
            ends = record.arrivals_ns[1:]
            gaps = [
                gap for gap, at_ns in zip(gaps_ms(record.arrivals_ns), ends, strict=True)
                if at_ns > slowed_ns
            ]  # fmt: skip
            side.gaps_ms.append(max(gaps, default=0.0))
            side.itl_ms += gaps
            last_ns = record.arrivals_ns[-1] if record.arrivals_ns else slowed_ns
            side.stream_s.append((last_ns - slowed_ns) / 1e9)
            side.broken += record.broken
            reference = self._references.setdefault(number, record.token_ids)
            found = compare(reference, record.token_ids, finished=not record.broken)
            side.lost += found.lost
            side.repeated += found.repeated
        side.round_worst_ms.append(max(side.gaps_ms[-len(records) :]))
        side.moves += status["recent_moves"]
