"""`zerolayer demo`: an answer survives the death and the freezing of the engine that writes it.

One request, five times: undisturbed, with its engine killed, with its engine frozen, killed again
but continued by re-prefill, and on stock vLLM. Every figure is of this run. The fleet ends before
stock vLLM starts, so that neither disturbs the other.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
from rich.console import Console

from zerolayer.bench.compare import compare, gaps_around, worst_gap_ms
from zerolayer.bench.demo_result import Act, DemoActs, result_of, table_of
from zerolayer.bench.fleet_process import SERVED_NAME, FleetOptions, FleetProcess, PlainVllm
from zerolayer.bench.narration import lines_on
from zerolayer.bench.prompts import story
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt
from zerolayer.bench.strike import MoveSeen, Strike, heal
from zerolayer.core.errors import ConfigError, EngineError

STRIKE_AFTER_TOKENS = 24
#: Long enough that computing it again takes longer than loading it.
LOG_WORDS = 700
QUESTION = "You have read the log of the lighthouse. Tell me the story of its keeper."
BEFORE, AFTER, FAULT, HEAD = "default", "bold green", "bold white on red", "bold"


@dataclass(frozen=True)
class DemoOptions:
    """What to show."""

    model: str
    """A folder, or a hub name."""
    engines: int = 2
    tokens: int = 72
    """Length of the answer."""
    seed: int = 7
    plain_vllm: bool = True
    """Show stock vLLM too (about a minute)."""

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be shown."""
        if self.engines < 2:
            raise ConfigError("--engines", self.engines, "give at least 2: one must take over")
        least = STRIKE_AFTER_TOKENS + 16
        if self.tokens < least:
            raise ConfigError("--tokens", self.tokens, f"give at least {least}")

    def request(
        self, on_tokens: Callable[[StreamRecord], None] | None, *, resume: str | None = None
    ) -> StreamRequest:
        """The demo's one request: sampled with a seed, so that its randomness must go on too."""
        log = story(Random(self.seed), LOG_WORDS)
        body: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": f"The log of the lighthouse: {log}"},
                {"role": "user", "content": QUESTION},
            ],
            "max_tokens": self.tokens,
            "min_tokens": self.tokens,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": self.seed,
            "cache_salt": cold_salt(),
        }
        if resume is not None:
            body["vllm_xargs"] = {"zerolayer_resume": resume}
        return StreamRequest(body, kind="chat", on_tokens=on_tokens)


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Show it; returns the result, whose `promise_held` decides the exit status.

    Raises `ZeroLayerError` when the fleet does not come up or the undisturbed run fails.
    """
    options.check()
    began = time.monotonic()
    say = lines_on(console)
    fleet = FleetProcess(FleetOptions(options.model, options.engines), say)
    say(f"starting {options.engines} engines, about a minute")
    with fleet:
        say(f"all engines ready after {fleet.start_seconds:.0f} s")
        show = _Show(options, console, fleet.base_url)
        undisturbed, kill, freeze, prefill = asyncio.run(show.on_fleet())
    assert fleet.ended is not None
    left = [*fleet.ended.leftover_processes, *fleet.ended.leftover_files]
    plain, missing = None, "left out"
    if options.plain_vllm:
        plain, missing = _on_plain_vllm(options, console, show.reference)
    acts = DemoActs(undisturbed, kill, freeze, prefill, plain, missing, left)
    console.print()
    console.print(table_of(acts))
    return result_of(acts, time.monotonic() - began)


class _Show:
    """The acts on the fleet."""

    def __init__(self, options: DemoOptions, console: Console, url: str) -> None:
        self._options = options
        self._console = console
        self._say = lines_on(console)
        self._url = url
        self.reference: list[int] = []

    async def on_fleet(self) -> tuple[Act, Act, Act, Act]:
        """Undisturbed, kill, freeze, kill with re-prefill."""
        async with StreamClient(self._url, SERVED_NAME) as client:
            try:
                undisturbed = await self._undisturbed(client)
                kill = await self._struck(client, "kill", "killed (SIGKILL)")
                freeze = await self._struck(client, "freeze", "frozen (SIGSTOP)")
                prefill = await self._struck(
                    client, "kill", "killed, re-prefilled", resume="prefill"
                )
            except httpx.HTTPError as error:
                raise EngineError(f"the fleet does not answer: {error!r}") from error
        return undisturbed, kill, freeze, prefill

    async def _undisturbed(self, client: StreamClient) -> Act:
        self._head("1. The answer, undisturbed")
        record = await client.run(self._options.request(self._print_in(BEFORE)))
        self._console.print()
        if record.broken:
            raise EngineError(f"the undisturbed run failed: {record.fault}")
        self.reference = list(record.token_ids)
        gap_ms = round(worst_gap_ms(record.arrivals_ns), 1)
        return Act("undisturbed", len(record.token_ids), 0, 0, True, None, gap_ms, False)

    async def _struck(
        self, client: StreamClient, cause: str, title: str, *, resume: str | None = None
    ) -> Act:
        self._head(
            f"{'4' if resume else '2' if cause == 'kill' else '3'}. Engine {title}, mid-sentence"
        )
        record = StreamRecord()
        strike = Strike(cause, STRIKE_AFTER_TOKENS, [record])
        told = False

        def on_tokens(record: StreamRecord) -> None:
            nonlocal told
            self._print(record.last_text, AFTER if strike.struck_ns else BEFORE)
            strike.on_tokens(record)
            if strike.struck_ns and strike.row is not None and not told:
                told = True
                name = "SIGKILL" if cause == "kill" else "SIGSTOP"
                self._print(f" {name} {strike.row['id']} ", FAULT)

        aiming = asyncio.create_task(strike.aim(client))
        try:
            await client.run(self._options.request(on_tokens, resume=resume), record)
        finally:
            aiming.cancel()
            strike.wake()
        self._console.print()
        moves = strike.moves_of(record, await client.status())
        act = act_of(title, self.reference, record, strike.struck_ns, moves)
        self._say(_what_happened(act))
        if resume is None:
            self._say("waiting until that engine serves again")
            missing_s = strike.missing_s(await heal(client, strike))
            self._say(
                "all engines ready" + (f", it was away {missing_s:.1f} s" if missing_s else "")
            )
        return act

    def _head(self, text: str) -> None:
        self._console.print()
        self._console.print(text, style=HEAD, markup=False, highlight=False)

    def _print_in(self, style: str) -> Callable[[StreamRecord], None]:
        return lambda record: self._print(record.last_text, style)

    def _print(self, text: str, style: str) -> None:
        print_text(self._console, text, style)


def print_text(console: Console, text: str, style: str) -> None:
    """A piece of the answer, as it comes."""
    console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)


def act_of(
    title: str,
    reference: list[int],
    record: StreamRecord,
    struck_ns: int,
    moves: Sequence[MoveSeen],
) -> Act:
    """One disturbed run against the undisturbed one; `moves`: those that this stream made."""
    difference = compare(reference, record.token_ids, finished=not record.broken)
    moments_ns = [move.declared_ns for move in moves] or [struck_ns]
    gaps = gaps_around(record.arrivals_ns, struck_ns, moments_ns)
    return Act(
        title=title,
        delivered=len(record.token_ids),
        lost=difference.lost,
        repeated=difference.repeated,
        exact=difference.exact,
        gap_ms=None if gaps.at_fault_ms is None else round(gaps.at_fault_ms, 1),
        other_gap_ms=round(gaps.other_ms, 1),
        broken=record.broken,
        moved=bool(moves),
        note=record.fault[:80],
        after_declared_ms=max((m.after_declared_ms for m in moves), default=None),
        restored_tokens=max((m.restored_tokens for m in moves), default=0),
    )


def _what_happened(act: Act) -> str:
    if act.broken:
        return f"-> the stream broke after {act.delivered} tokens: {act.note}"
    how = (
        f"{act.restored_tokens} tokens taken from the snapshot"
        if act.restored_tokens
        else "computed again"
    )
    same = "the same tokens as undisturbed" if act.exact else "other text than undisturbed"
    declared = (
        "" if act.after_declared_ms is None else f", {act.after_declared_ms:.0f} ms of it ours"
    )
    gap = "" if act.gap_ms is None else f"gap {act.gap_ms:.0f} ms{declared}, "
    return f"-> {gap}{how}, {act.lost} lost, {act.repeated} repeated, {same}"


def _on_plain_vllm(
    options: DemoOptions, console: Console, reference: list[int]
) -> tuple[Act | None, str]:
    """The same on stock vLLM; (None, why) when it cannot be measured here."""
    console.print()
    console.print(
        "5. Plain vLLM (vllm serve --data-parallel-size), one engine killed", style=HEAD,
        markup=False, highlight=False,
    )  # fmt: skip
    try:
        fleet = FleetOptions(options.model, options.engines)
        with PlainVllm(fleet, lines_on(console)) as server:
            return asyncio.run(_killed_on_plain(server, options, console, reference)), ""
    except EngineError as error:
        return None, str(error).splitlines()[0]


async def _killed_on_plain(
    server: PlainVllm, options: DemoOptions, console: Console, reference: list[int]
) -> Act:
    due = asyncio.Event()
    struck_ns = 0

    def on_tokens(record: StreamRecord) -> None:
        print_text(console, record.last_text, AFTER if struck_ns else BEFORE)
        if record.tokens >= STRIKE_AFTER_TOKENS:
            due.set()

    async def kill_its_engine() -> None:
        nonlocal struck_ns
        await due.wait()
        await asyncio.to_thread(server.kill_busiest_engine)
        struck_ns = time.monotonic_ns()
        print_text(console, " SIGKILL ", FAULT)

    async with StreamClient(server.base_url, SERVED_NAME) as client:
        killing = asyncio.create_task(kill_its_engine())
        record = await client.run(options.request(on_tokens))
        if not due.is_set():
            killing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killing
    console.print()
    act = act_of("killed, on plain vLLM", reference, record, struck_ns, [])
    lines_on(console)(_what_happened(act))
    return act
