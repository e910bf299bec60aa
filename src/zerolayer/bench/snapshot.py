"""`bench snapshot`: bytes and microseconds that one token's snapshot costs, by method and codec.

On real KV pages of the real model, copied from a live fleet's arena: the row gather that Zero-Layer
does, a copy of the whole block, and the way that was claimed for such systems (compare 4-KiB pages
with the state before, compress those that changed). Copies are measured in memory that is warm, the
best of some repetitions each, and their median over steps.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from zerolayer.arena.reader import ArenaReader
from zerolayer.arena.tables import KvSnapshotMeta
from zerolayer.bench.compare import percentile
from zerolayer.bench.fleet_process import SERVED_NAME, FleetOptions, FleetProcess
from zerolayer.bench.kv_steps import (
    Step,
    StepCopy,
    copy_newest_page,
    derive_rows,
    gather,
    layers_of,
    steps_of,
)
from zerolayer.bench.narration import lines_on
from zerolayer.bench.prompts import prompt_of
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt
from zerolayer.core.errors import ConfigError, EngineError

MEMORY_PAGE_BYTES = 4096
REPETITIONS = 5
STEPS_MAX = 64
"""Steps that are measured, spread evenly over those that were caught."""
PROMPT_TOKENS = 100
CLAIMED = {"kib_per_token": [1.8, 4.3], "us_per_token": [23, 29], "how": "4-KiB pages and LZ4"}
CODECS = ("none", "lz4", "zstd")
FIND_STREAM_TIMEOUT_S = 10.0
FIND_STREAM_POLL_S = 0.05

Codec = Callable[[bytes], bytes]


@dataclass(frozen=True)
class SnapshotOptions:
    """What to measure."""

    model: str
    """A model folder."""
    tokens: int = 200
    """Tokens that the stream decodes while its pages are copied."""
    seed: int = 0

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        if self.tokens < 80:
            raise ConfigError("--tokens", self.tokens, "give at least 80: each row must be seen")


def run_snapshot(options: SnapshotOptions, console: Console) -> dict[str, Any]:
    """Measure; returns the result. Raises `ZeroLayerError`."""
    options.check()
    codecs = load_codecs()
    layers = layers_of(options.model)
    say = lines_on(console)
    fleet = FleetProcess(FleetOptions(options.model, engines=1), say)
    with fleet:
        copies, block_tokens = asyncio.run(_collect(fleet, options))
    steps = steps_of(copies, block_tokens)
    say(f"caught {len(steps)} decode steps of {options.tokens}; measuring each method")
    rows = derive_rows(steps, layers, block_tokens)
    every = max(1, len(steps) // STEPS_MAX)
    chosen = steps[::every][:STEPS_MAX]
    methods: dict[str, Any] = {}
    if not isinstance(rows, str):
        methods["row_gather"] = measure(chosen, lambda step: _rows(step, layers, rows), codecs)
    methods["whole_block"] = measure(chosen, lambda step: step.after.tobytes(), codecs)
    methods["pages_that_changed"] = measure(chosen, changed_pages, codecs)
    return {
        "methods": methods,
        "claimed": CLAIMED,
        "layout_index": rows if isinstance(rows, str) else f"{len(rows)} of {block_tokens} rows",
        "engine_wrote_kib_per_token": _kib(percentile([s.bytes_written for s in steps], 0.5)),
        "changed_pages_of_block": _changed_share(chosen),
        # Rows that no token has filled yet are zeros, which flatters codecs on whole blocks.
        "mean_rows_filled": round(sum(step.row + 1 for step in chosen) / len(chosen), 1),
        "block_kib": _kib(chosen[0].after.nbytes),
        "block_tokens": block_tokens,
        "layers": layers,
        "steps": len(chosen),
        "seed": options.seed,
    }


def load_codecs() -> dict[str, Codec]:
    """The codecs by name. Raises `ConfigError` when one is not installed."""
    try:
        import lz4.block
        import zstandard
    except ImportError as cause:
        raise ConfigError(
            "codec", cause.name, f"it is not installed: pip install {cause.name}"
        ) from cause
    zstd = zstandard.ZstdCompressor(level=1)
    return {
        "none": lambda data: data,
        "lz4": lambda data: bytes(lz4.block.compress(data)),
        "zstd": zstd.compress,
    }


async def _collect(fleet: FleetProcess, options: SnapshotOptions) -> tuple[list[StepCopy], int]:
    """Decode one stream and copy its newest page after each of its tokens."""
    reader = ArenaReader(_arena_of(fleet))
    copies: list[StepCopy] = []
    stream_id = ""

    def copy_page(record: StreamRecord) -> None:
        copied = copy_newest_page(reader, stream_id) if stream_id else None
        if copied is not None:
            copies.append(copied)

    async with StreamClient(fleet.base_url, SERVED_NAME) as client:
        prompt = await prompt_of(client.tokenize, Random(options.seed), PROMPT_TOKENS)
        record = StreamRecord()
        body = {
            "prompt": prompt,
            "max_tokens": options.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": cold_salt(),
        }
        running = asyncio.create_task(client.run(StreamRequest(body, on_tokens=copy_page), record))
        try:
            stream_id = await _stream_id(fleet, record)
        finally:
            await running
    if record.broken:
        raise EngineError(f"the stream failed: {record.fault}")
    block_tokens = reader.geometry.block_tokens
    reader.close()
    return copies, block_tokens


def _arena_of(fleet: FleetProcess) -> Any:
    row = fleet.status()["engines"][0]
    if row["snapshots"] != "on":
        raise EngineError(f"engine {row['id']} keeps no snapshots: {row['snapshots']}")
    return fleet.runtime().arena_path(row["slot"], row["incarnation"], 0)


async def _stream_id(fleet: FleetProcess, record: StreamRecord) -> str:
    """The id under which the fleet knows the stream, from its public table."""
    began = time.monotonic()
    table = KvSnapshotMeta.open_reader(fleet.runtime().table_path("kv_snapshot_meta"))
    try:
        while time.monotonic() - began < FIND_STREAM_TIMEOUT_S:
            for row in table.rows():
                if record.response_id and row.stream.startswith(record.response_id):
                    return row.stream
            await asyncio.sleep(FIND_STREAM_POLL_S)
    finally:
        table.close()
    raise EngineError(f"stream {record.response_id or '(unknown)'} never appeared in a snapshot")


def _rows(step: Step, layers: int, rows: dict[int, NDArray[np.int64]]) -> bytes:
    return gather(step.after, layers, rows[step.row]).tobytes()


def changed_pages(step: Step) -> bytes:
    """The 4-KiB pages of the block that differ from before the step, one after the other."""
    pad = -step.after.size % MEMORY_PAGE_BYTES
    after = np.pad(step.after, (0, pad)) if pad else step.after
    before = np.pad(step.before, (0, pad)) if pad else step.before
    pages = after.reshape(-1, MEMORY_PAGE_BYTES)
    differs = (pages != before.reshape(-1, MEMORY_PAGE_BYTES)).any(axis=1)
    changed: NDArray[np.uint8] = pages[differs]
    return changed.tobytes()


def measure(
    steps: Sequence[Step], take: Callable[[Step], bytes], codecs: dict[str, Codec]
) -> dict[str, Any]:
    """KiB and microseconds a token of one method, for each codec: taking plus compressing."""
    figures: dict[str, Any] = {}
    for name, codec in codecs.items():
        sizes, took_us = [], []
        for step in steps:
            size, seconds = _best(lambda step=step, codec=codec: len(codec(take(step))))  # type: ignore[misc]
            sizes.append(size)
            took_us.append(1e6 * seconds)
        figures[name] = {
            "kib_per_token": _kib(sum(sizes) / len(sizes)),
            "us_per_token": round(percentile(took_us, 0.5) or 0.0, 1),
        }
    return figures


def _best(work: Callable[[], int]) -> tuple[int, float]:
    """The result and the shortest time of `REPETITIONS` runs, in seconds."""
    best, result = float("inf"), 0
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - began)
    return result, best


def _changed_share(steps: Sequence[Step]) -> str:
    pages = -(-steps[0].after.size // MEMORY_PAGE_BYTES)
    changed = [len(changed_pages(step)) // MEMORY_PAGE_BYTES for step in steps]
    return f"{sum(changed) / len(changed):.0f} of {pages}"


def _kib(size: float | None) -> float | None:
    return None if size is None else round(size / 1024, 2)
