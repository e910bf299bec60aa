"""`bench roll`: a whole fleet is restarted, engine by engine, under concurrent long streams.

Each client streams the same prompt again and again until the roll is over; every stream is compared
token by token with the undisturbed run of the same prompt beside the same others. That run is made
twice: vLLM's sums may depend on what else is in a batch, and the second run says how often.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rich.console import Console

from zerolayer.bench.compare import compare, summary, worst_gap_ms
from zerolayer.bench.fleet_process import SERVED_NAME, FleetOptions, FleetProcess
from zerolayer.bench.narration import lines_on
from zerolayer.bench.orders import carry_out
from zerolayer.bench.prompts import prompt_of
from zerolayer.bench.server_process import Progress
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt
from zerolayer.core.errors import ConfigError, EngineError

#: The roll begins once every stream has so many tokens.
FIRST_TOKENS = 10
BEGIN_TIMEOUT_S = 300.0
FAULTS_SHOWN = 10


@dataclass(frozen=True)
class RollOptions:
    """What to measure."""

    model: str
    streams: int = 8
    """Concurrent clients; each streams without a pause."""
    tokens: int = 300
    """Of each answer."""
    context: int = 100
    """Prompt tokens."""
    engines: int = 2
    vllm_args: tuple[str, ...] = ()
    """New words for vLLM; empty: restarted as they are."""
    seed: int = 0

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        for name, value, least in (
            ("streams", self.streams, 1), ("tokens", self.tokens, 2 * FIRST_TOKENS),
            ("context", self.context, 1), ("engines", self.engines, 2),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"--{name}", value, f"give at least {least}")


def run_roll(options: RollOptions, console: Console) -> dict[str, Any]:
    """Measure; returns the result. Raises `ZeroLayerError` when the roll stops."""
    options.check()
    say, began = lines_on(console), time.monotonic()
    with FleetProcess(FleetOptions(options.model, options.engines), say) as fleet:
        result = asyncio.run(_Rolled(options, fleet.base_url, say).run())
    assert fleet.ended is not None
    result["left_behind"] = [*fleet.ended.leftover_processes, *fleet.ended.leftover_files]
    return {**result, "seconds": round(time.monotonic() - began, 1)}


class _Rolled:
    """One roll under load, beside two undisturbed runs of the same load."""

    def __init__(self, options: RollOptions, url: str, say: Progress) -> None:
        self._options = options
        self._url = url
        self._say = say
        self._prompts: list[list[int]] = []

    async def run(self) -> dict[str, Any]:
        rng = Random(self._options.seed)
        async with StreamClient(self._url, SERVED_NAME) as client:
            for _ in range(self._options.streams):
                prompt = await prompt_of(client.tokenize, rng, self._options.context)
                self._prompts.append(prompt)
            quiet = [await self._side_by_side(client) for _ in range(2)]
            references = [record.token_ids for record in quiet[0]]
            self._say("rolling")
            rolled, roll = await self._under_roll(client)
        return {
            **judged(references, quiet[1], rolled),
            "tokens_per_stream": self._options.tokens,
            "seed": self._options.seed,
            "roll": roll,
        }

    async def _side_by_side(self, client: StreamClient) -> list[StreamRecord]:
        records = await client.run_all([self._request(p) for p in self._prompts])
        for record in records:
            if record.broken or len(record.token_ids) != self._options.tokens:
                raise EngineError(f"the undisturbed run failed: {record.fault or 'too short'}")
        gap = max(worst_gap_ms(record.arrivals_ns) for record in records)
        self._say(f"undisturbed: {len(records)} streams, worst gap {gap:.0f} ms")
        return records

    def _request(
        self, prompt: list[int], on_tokens: Callable[[StreamRecord], None] | None = None
    ) -> StreamRequest:
        return StreamRequest(
            {
                "prompt": prompt, "max_tokens": self._options.tokens, "temperature": 0,
                "ignore_eos": True, "cache_salt": cold_salt(),
            },
            on_tokens=on_tokens,
        )  # fmt: skip

    async def _under_roll(
        self, client: StreamClient
    ) -> tuple[list[list[StreamRecord]], dict[str, Any]]:
        """Every client's streams, and what the fleet says of the roll."""
        begun, over = asyncio.Event(), asyncio.Event()
        records: list[list[StreamRecord]] = [[] for _ in self._prompts]

        def on_tokens(_record: StreamRecord) -> None:
            if all(own and own[0].tokens >= FIRST_TOKENS for own in records):
                begun.set()

        async def stream_on(number: int) -> None:
            while not over.is_set():
                records[number].append(record := StreamRecord())
                await client.run(self._request(self._prompts[number], on_tokens), record)

        async with asyncio.TaskGroup() as group:
            for number in range(len(self._prompts)):
                group.create_task(stream_on(number))
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                await begun.wait()
            try:
                fields = {"vllm_args": list(self._options.vllm_args)}
                roll = await asyncio.to_thread(carry_out, self._url, "roll", fields, self._say)
            finally:
                over.set()
        return records, roll


def judged(
    references: list[list[int]],
    quiet: list[StreamRecord],
    rolled: list[list[StreamRecord]],
) -> dict[str, Any]:
    """Each client's streams during the roll against its undisturbed token ids.

    `quiet`: the second undisturbed run of each client.
    """
    pairs = [(ref, record) for ref, own in zip(references, rolled, strict=True)
             for record in own]  # fmt: skip
    found = [compare(ref, r.token_ids, finished=not r.broken) for ref, r in pairs]
    differing = sum(not each.exact for each in found)
    quiet_differing = sum(
        record.token_ids != ref for ref, record in zip(references, quiet, strict=True)
    )
    gaps = [worst_gap_ms(record.arrivals_ns) for _, record in pairs]
    quiet_gaps = [worst_gap_ms(record.arrivals_ns) for record in quiet]
    return {
        "streams": len(pairs),
        "streams_at_a_time": len(references),
        "broken": sum(record.broken for _, record in pairs),
        "faults": [r.fault for _, r in pairs if r.broken][:FAULTS_SHOWN],
        "tokens_lost": sum(each.lost for each in found),
        "tokens_repeated": sum(each.repeated for each in found),
        # Without undisturbed runs that repeat, a difference says nothing of the moves.
        "exact": differing == 0 if quiet_differing == 0 else None,
        "differing": differing,
        "undisturbed_differing": quiet_differing,
        "worst_gap_ms": summary(gaps),
        "worst_gap_of_each_client_ms": [
            round(max(worst_gap_ms(record.arrivals_ns) for record in own), 1) for own in rolled
        ],
        "undisturbed_worst_gap_ms": summary(quiet_gaps),
    }
