"""`bench failover`: engines killed and frozen under running streams, against undisturbed runs.

Each round starts streams, strikes the engine that computes them at a random token, reads them to
their end and compares them token by token with the same request undisturbed. Rounds alternate
between continuation from the snapshot and by re-prefill. Every run is cold (`cold_salt`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
from rich.console import Console

from zerolayer.bench import chaos_signals
from zerolayer.bench.compare import (
    compare,
    gaps_around,
    gaps_ms,
    percentile,
    summary,
    worst_gap_ms,
)
from zerolayer.bench.failover_report import MODES, Trial, differences, report
from zerolayer.bench.fleet_process import (
    HEAL_TIMEOUT_S,
    SERVED_NAME,
    FleetOptions,
    FleetProcess,
)
from zerolayer.bench.narration import lines_on
from zerolayer.bench.prompts import prompt_of
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt
from zerolayer.bench.strike import Strike, heal
from zerolayer.core.errors import ConfigError, EngineError

#: Rounds of undisturbed concurrent streams that the disturbed ones are judged by.
QUIET_ROUNDS = 3
#: A fault strikes neither before this many tokens nor within the last ones of a stream.
FIRST_CUT, LAST_CUT = 2, 8
#: A fault can come too late when a status answer is slow; the round is then done again.
STRIKE_TRIES = 3


@dataclass(frozen=True)
class FailoverOptions:
    """What to measure."""

    model: str
    """Folder or hub name for the fleet that is started; with `url`, what that fleet serves."""
    kills: int = 20
    freezes: int = 10
    contexts: tuple[int, ...] = (100, 1000, 3500)
    """Prompt lengths in tokens."""
    streams: int = 1
    """Streams at a time."""
    tokens: int = 64
    """Tokens of each answer."""
    engines: int = 2
    seed: int = 0
    url: str | None = None
    """A running fleet on this host; None starts one."""
    heal_timeout_s: float = HEAL_TIMEOUT_S

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        for name, value, least in (
            ("kills", self.kills, 0), ("freezes", self.freezes, 0), ("streams", self.streams, 1),
            ("engines", self.engines, 2), ("tokens", self.tokens, FIRST_CUT + LAST_CUT + 1),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"--{name}", value, f"give at least {least}")
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError("--contexts", self.contexts, "give prompt lengths of 1 token or more")


def run_failover(options: FailoverOptions, console: Console) -> dict[str, Any]:
    """Measure; returns the result. Raises `ZeroLayerError` when the fleet stays away."""
    options.check()
    began = time.monotonic()
    if options.url is not None:
        bench = _Bench(options, options.url, options.model, console)
        result = asyncio.run(bench.run())
        return {**result, "seconds": round(time.monotonic() - began, 1)}
    fleet = FleetProcess(FleetOptions(options.model, options.engines), lines_on(console))
    with fleet:
        bench = _Bench(options, fleet.base_url, SERVED_NAME, console)
        result = asyncio.run(bench.run())
    assert fleet.ended is not None
    result["left_behind"] = [*fleet.ended.leftover_processes, *fleet.ended.leftover_files]
    return {**result, "seconds": round(time.monotonic() - began, 1)}


class _Bench:
    """One measurement against one running fleet."""

    def __init__(self, options: FailoverOptions, url: str, model: str, console: Console) -> None:
        self._options = options
        self._url = url
        self._model = model
        self._say_line = lines_on(console)
        self._rng = Random(options.seed)
        self._prompts: dict[int, list[int]] = {}
        self._references: dict[int, list[int]] = {}
        self._itl_ms: dict[int, float] = {}
        self._missing_s: list[float] = []
        self._trials: list[Trial] = []
        self._missed = 0

    async def run(self) -> dict[str, Any]:
        """References first, then quiet rounds if concurrent, then the faults."""
        options = self._options
        async with self._client() as client:
            chaos_signals.runtime_of(await client.status())
            repeated_exactly = await self._make_references(client)
            if options.streams > 1:
                for number in range(QUIET_ROUNDS):
                    await self._round(client, "none", MODES[0], number)
            for number, cause in enumerate(self._causes()):
                # Both modes meet every context length: the length changes at every second round.
                await self._round(client, cause, MODES[number % 2], number // 2)
        result = report(self._trials, options.contexts)
        if options.streams > 1:
            result["differences"] = differences(self._trials)
        return {
            **result,
            "undisturbed_repeats_exactly": repeated_exactly,
            "undisturbed_itl_ms_p50": {str(k): ms for k, ms in self._itl_ms.items()},
            "missing_s": summary(self._missing_s),
            "faults_that_came_too_late": self._missed,
            "kills": options.kills,
            "freezes": options.freezes,
            "streams_at_a_time": options.streams,
            "tokens_per_stream": options.tokens,
            "seed": options.seed,
        }

    def _causes(self) -> Iterator[str]:
        yield from ["kill"] * self._options.kills
        yield from ["freeze"] * self._options.freezes

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[StreamClient]:
        async with StreamClient(self._url, self._model) as client:
            try:
                yield client
            except httpx.HTTPError as error:
                raise EngineError(f"the fleet at {self._url} does not answer: {error!r}") from error

    async def _make_references(self, client: StreamClient) -> bool:
        """Two undisturbed runs of each prompt; returns whether all pairs are equal."""
        equal = True
        for context in self._options.contexts:
            prompt = await prompt_of(client.tokenize, self._rng, context)
            self._prompts[context] = prompt
            runs = [await client.run(self._request(context, MODES[0])) for _ in range(2)]
            for record in runs:
                if record.broken or len(record.token_ids) != self._options.tokens:
                    raise EngineError(f"the undisturbed run failed: {record.fault or 'too short'}")
            self._references[context] = runs[0].token_ids
            gaps = [gap for record in runs for gap in gaps_ms(record.arrivals_ns)]
            self._itl_ms[context] = round(percentile(gaps, 0.5) or 0.0, 1)
            equal &= runs[0].token_ids == runs[1].token_ids
            self._say_line(
                f"reference: {context} + {self._options.tokens} tokens, first token after "
                f"{runs[1].ttft_ms:.0f} ms, worst gap {worst_gap_ms(runs[1].arrivals_ns):.0f} ms, "
                f"repeats exactly: {runs[0].token_ids == runs[1].token_ids}"
            )
        return equal

    def _request(self, context: int, mode: str, strike: Strike | None = None) -> StreamRequest:
        body: dict[str, Any] = {
            "prompt": self._prompts[context],
            "max_tokens": self._options.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": cold_salt(),
        }
        if mode == "prefill":
            body["vllm_xargs"] = {"zerolayer_resume": "prefill"}
        return StreamRequest(body, on_tokens=strike.on_tokens if strike is not None else None)

    async def _round(self, client: StreamClient, cause: str, mode: str, number: int) -> None:
        """Streams, one fault among them, and everything put right again."""
        options = self._options
        contexts = [
            options.contexts[(number + k) % len(options.contexts)] for k in range(options.streams)
        ]
        for _ in range(STRIKE_TRIES):
            records = [StreamRecord() for _ in contexts]
            strike = self._strike(cause, records) if cause != "none" else None
            try:
                await self._stream_all(client, contexts, mode, records, strike)
            finally:
                status = await heal(client, strike, options.heal_timeout_s)
            if strike is None or strike.struck_ns:
                self._note(contexts, mode, records, strike, status)
                self._say(cause, mode, len(contexts), strike.missing_s(status) if strike else 0.0)
                return
            self._missed += 1
        raise EngineError("no fault could be placed under the streams: they ended too early")

    def _strike(self, cause: str, records: list[StreamRecord]) -> Strike:
        last = self._options.streams * (self._options.tokens - LAST_CUT)
        return Strike(cause, self._rng.randrange(FIRST_CUT, last), records)

    async def _stream_all(
        self,
        client: StreamClient,
        contexts: Sequence[int],
        mode: str,
        records: list[StreamRecord],
        strike: Strike | None,
    ) -> None:
        async with asyncio.TaskGroup() as group:
            aiming = group.create_task(strike.aim(client)) if strike is not None else None
            running = [
                group.create_task(client.run(self._request(context, mode, strike), record))
                for context, record in zip(contexts, records, strict=True)
            ]
            await asyncio.gather(*running)
            if aiming is not None:
                aiming.cancel()

    def _note(
        self,
        contexts: Sequence[int],
        mode: str,
        records: Sequence[StreamRecord],
        strike: Strike | None,
        status: Mapping[str, Any],
    ) -> None:
        """Make trials of a round's streams; `status`: the fleet's, once it is whole again."""
        self._trials += [
            self._trial(context, mode, record, strike, status)
            for context, record in zip(contexts, records, strict=True)
        ]

    def _trial(
        self,
        context: int,
        mode: str,
        record: StreamRecord,
        strike: Strike | None,
        status: Mapping[str, Any],
    ) -> Trial:
        """One stream against its reference; `status`: the fleet's, after the round."""
        struck_ns = strike.struck_ns if strike is not None else 0
        before = sum(1 for at_ns in record.arrivals_ns if at_ns <= struck_ns)
        ours = strike.moves_of(record, status) if strike is not None else []
        hurt = strike.row["id"] if strike is not None and strike.row is not None else ""
        caused = [move for move in ours if move.source == hurt and not move.on_purpose]
        gaps = gaps_around(record.arrivals_ns, struck_ns, [move.declared_ns for move in caused])
        cause = "none" if strike is None else strike.cause
        return Trial(
            cause=cause,
            mode=mode,
            context_tokens=context,
            broken=record.broken,
            fault=record.fault,
            comparison=compare(
                self._references[context], record.token_ids, finished=not record.broken
            ),
            counted_tokens=(record.usage or {}).get("completion_tokens"),
            received_tokens=len(record.token_ids),
            gap_ms=gaps.at_fault_ms,
            other_gap_ms=gaps.other_ms,
            moved=bool(caused),
            cut_after=before,
            after_declared_ms=tuple(move.after_declared_ms for move in caused),
            restored_tokens=max((move.restored_tokens for move in caused), default=0),
            declared_ms=tuple(move.declared_ms for move in caused),
            unasked_moves=tuple(
                f"from {move.source}, {move.declared_ms:.0f} ms after the {cause} of {hurt}, "
                f"because: {move.reason}"
                for move in ours
                if move.source != hurt or move.on_purpose
            ),
        )

    def _say(self, cause: str, mode: str, streams: int, missing_s: float) -> None:
        """One line about the newest round."""
        trials = self._trials[-streams:]
        if cause == "kill":
            self._missing_s.append(missing_s)
        done = sum(1 for trial in self._trials if trial.cause == cause) // self._options.streams
        wanted = {"kill": self._options.kills, "freeze": self._options.freezes}.get(
            cause, QUIET_ROUNDS
        )
        moved = [trial for trial in trials if trial.moved]
        self._say_line(
            f"{cause} {done}/{wanted} {mode:8} "
            f"context {'/'.join(str(c) for c in sorted({t.context_tokens for t in trials}))}: "
            f"moved {len(moved)} of {len(trials)}, "
            f"gap {max((t.gap_ms or 0.0 for t in moved), default=0.0):.0f} ms "
            f"(declared after {max((ms for t in moved for ms in t.declared_ms), default=0.0):.0f}, "
            f"then {max((ms for t in moved for ms in t.after_declared_ms), default=0.0):.0f}), "
            f"other {max((t.other_gap_ms for t in trials), default=0.0):.0f} ms, "
            f"exact {sum(t.comparison.exact for t in trials)}/{len(trials)}, "
            f"lost {sum(t.lost for t in trials)}, repeated {sum(t.repeated for t in trials)}, "
            f"broken {sum(t.broken for t in trials)}, "
            f"unasked moves {sum(len(t.unasked_moves) for t in trials)}, "
            f"engine missing for {missing_s:.1f} s"
        )
