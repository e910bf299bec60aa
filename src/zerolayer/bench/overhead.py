"""`bench overhead`: what Zero-Layer costs, as ratios to stock vLLM under the same closed-loop load.

Three servers: stock `vllm serve --data-parallel-size N`, `zerolayer serve` without and with
snapshots. One server runs at a time and each run starts its own: three at once would need six
engines' memory, and their idle work would disturb the one that is measured on few cores. Every
round runs each server once, in an order that rotates, so that a slow minute of the machine hits
all three; the figures are medians over rounds, and the ratios are taken within each round.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import psutil
from rich.console import Console

from zerolayer.bench.compare import gaps_ms, percentile
from zerolayer.bench.fleet_process import (
    SERVED_NAME,
    FleetOptions,
    FleetProcess,
    PlainVllm,
)
from zerolayer.bench.narration import lines_on
from zerolayer.bench.prompts import prompt_of
from zerolayer.bench.server_process import Progress, ServerProcess
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt
from zerolayer.core.errors import ConfigError, EngineError

WARM_UP_S = 6.0
"""Of each run, before anything is counted: first steps are slow, and all streams begin at once."""
PROMPT_TOKENS = (20, 300)
ANSWER_TOKENS = (32, 96)
PROMPTS = 64
"""Different prompts; each request takes the next one, in the same order on each server."""
FIGURES = (
    "tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99",
    "cpu_s_per_1000_tokens",
)  # fmt: skip
PLAIN, WITHOUT, WITH = "plain_vllm", "zerolayer_no_snapshots", "zerolayer_snapshots"
SERVERS = (PLAIN, WITHOUT, WITH)


@dataclass(frozen=True)
class OverheadOptions:
    """What to measure."""

    model: str
    engines: int = 2
    rounds: int = 3
    seconds: float = 30.0
    """Counted seconds of each run, after the warm-up."""
    streams: int = 8
    """Streams at a time; each starts the next one when it ends."""
    seed: int = 0

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        for name, value, least in (
            ("engines", self.engines, 1), ("rounds", self.rounds, 1), ("streams", self.streams, 1),
            ("seconds", self.seconds, 1.0),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"--{name}", value, f"give at least {least}")


@dataclass(frozen=True)
class Window:
    """The counted part of a run; CLOCK_MONOTONIC nanoseconds."""

    begin_ns: int
    end_ns: int

    def __contains__(self, at_ns: int) -> bool:
        return self.begin_ns <= at_ns < self.end_ns


def run_overhead(options: OverheadOptions, console: Console) -> dict[str, Any]:
    """Measure; returns the result. Raises `ZeroLayerError` when a server does not come up."""
    options.check()
    began = time.monotonic()
    say = lines_on(console)
    rounds: list[dict[str, dict[str, float]]] = []
    left: list[str] = []
    for number in range(options.rounds):
        turn = number % len(SERVERS)
        figures: dict[str, dict[str, float]] = {}
        for name in (*SERVERS[turn:], *SERVERS[:turn]):
            server = make_server(name, options, say)
            with server:
                figures[name] = asyncio.run(_measure(server, options))
            assert server.ended is not None
            if name != PLAIN:
                left += [*server.ended.leftover_processes, *server.ended.leftover_files]
            say(f"round {number + 1}/{options.rounds} {name}: {_line(figures[name])}")
        rounds.append(figures)
    return {
        **combine(rounds),
        "rounds": options.rounds,
        "seconds_per_run": options.seconds,
        "streams_at_a_time": options.streams,
        "engines": options.engines,
        "seed": options.seed,
        "left_behind": left,
        "seconds": round(time.monotonic() - began, 1),
    }


def make_server(name: str, options: OverheadOptions, progress: Progress) -> ServerProcess:
    """One of `SERVERS`, not started."""
    fleet = FleetOptions(options.model, options.engines, snapshots=name == WITH)
    return PlainVllm(fleet, progress) if name == PLAIN else FleetProcess(fleet, progress)


async def _measure(server: ServerProcess, options: OverheadOptions) -> dict[str, float]:
    async with StreamClient(server.base_url, SERVED_NAME) as client:
        rng = Random(options.seed)
        prompts = [
            await prompt_of(client.tokenize, rng, rng.randint(*PROMPT_TOKENS))
            for _ in range(PROMPTS)
        ]
        now_ns = time.monotonic_ns()
        begin_ns = now_ns + int(WARM_UP_S * 1e9)
        window = Window(begin_ns, begin_ns + int(options.seconds * 1e9))
        records: list[StreamRecord] = []
        turns = iter(range(1_000_000_000))

        async def stream_after_stream() -> None:
            while time.monotonic_ns() < window.end_ns:
                turn = next(turns)
                records.append(StreamRecord())
                await client.run(_request(prompts, turn, options.seed), records[-1])

        async with asyncio.TaskGroup() as group:
            for _ in range(options.streams):
                group.create_task(stream_after_stream())
            cpu = group.create_task(_cpu_in(window, server))
        return figures_of(records, window, cpu.result())


def _request(prompts: Sequence[list[int]], turn: int, seed: int) -> StreamRequest:
    """Request number `turn`; the same on each server."""
    answer = Random(f"{seed}/{turn}").randint(*ANSWER_TOKENS)
    return StreamRequest(
        {
            "prompt": prompts[turn % len(prompts)],
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": cold_salt(),
        }
    )


@dataclass(frozen=True)
class CpuSpent:
    """Processor seconds inside the window."""

    server_s: float
    """By the server's whole tree."""
    foreign_s: float
    """By everything on this machine that is neither the server nor this measurement."""


async def _cpu_in(window: Window, server: ServerProcess) -> CpuSpent:
    """Who used the processors inside the window."""

    async def spent_at(at_ns: int) -> tuple[float, float]:
        await asyncio.sleep(max(0.0, (at_ns - time.monotonic_ns()) / 1e9))
        every, own = psutil.cpu_times(), psutil.Process().cpu_times()
        ours = sum(row.cpu_s for row in server.tree())
        return ours, every.user + every.nice + every.system - own.user - own.system - ours

    ours, foreign = await spent_at(window.begin_ns)
    ours_after, foreign_after = await spent_at(window.end_ns)
    return CpuSpent(ours_after - ours, max(0.0, foreign_after - foreign))


def figures_of(records: Sequence[StreamRecord], window: Window, cpu: CpuSpent) -> dict[str, float]:
    """One run's figures. Tokens count where they arrive, waits where they end.

    Raises `EngineError` when a stream broke or nothing arrived: then there is nothing to compare.
    """
    broken = [record.fault for record in records if record.broken]
    if broken:
        raise EngineError(f"{len(broken)} of {len(records)} streams broke: {broken[0]}")
    tokens = sum(at in window for record in records for at in record.arrivals_ns)
    if tokens == 0:
        raise EngineError("no token arrived while it was counted")
    ttft = [
        record.ttft_ms
        for record in records
        if record.ttft_ms is not None and record.sent_ns in window
    ]
    itl = [
        gap
        for record in records
        for at, gap in zip(record.arrivals_ns[1:], gaps_ms(record.arrivals_ns), strict=True)
        if at in window
    ]
    if not ttft or not itl:
        raise EngineError("no stream began while it was counted: give more seconds or streams")
    seconds = (window.end_ns - window.begin_ns) / 1e9
    return {
        "tokens_per_s": round(tokens / seconds, 2),
        "ttft_ms_p50": _percentile(ttft, 0.5),
        "ttft_ms_p99": _percentile(ttft, 0.99),
        "itl_ms_p50": _percentile(itl, 0.5),
        "itl_ms_p99": _percentile(itl, 0.99),
        "cpu_s_per_1000_tokens": round(1000.0 * cpu.server_s / tokens, 3),
        "foreign_cores": round(cpu.foreign_s / seconds, 2),
        "streams": len(records),
    }


def _percentile(values: Sequence[float], share: float) -> float:
    return round(percentile(values, share) or 0.0, 2)


def combine(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of each server over the rounds, and of the ratios to stock vLLM in each round."""

    def medians(pick: Callable[[Mapping[str, Mapping[str, float]], str], float]) -> dict[str, Any]:
        return {
            key: round(percentile([pick(figures, key) for figures in rounds], 0.5) or 0.0, 4)
            for key in FIGURES
        }

    def ratios(name: str) -> dict[str, Any]:
        return medians(lambda figures, key: figures[name][key] / max(figures[PLAIN][key], 1e-9))

    return {
        "servers": {name: medians(lambda f, key, name=name: f[name][key]) for name in SERVERS},  # type: ignore[misc]
        "ratio_to_plain_vllm": {name: ratios(name) for name in (WITHOUT, WITH)},
        # Cores that other programs used meanwhile: above some hundredths, a round says little.
        "foreign_cores_by_round": {
            name: [figures[name]["foreign_cores"] for figures in rounds] for name in SERVERS
        },
        "tokens_per_s_by_round": {
            name: [figures[name]["tokens_per_s"] for figures in rounds] for name in SERVERS
        },
    }


def _line(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {figures[key]:.2f}" for key in (*FIGURES, "foreign_cores"))
