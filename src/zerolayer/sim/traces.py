"""Public request traces, as arrays. Origin, licence and limits of each: `data/traces/README.md`."""

import csv
import gzip
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from zerolayer.core.errors import ConfigError
from zerolayer.core.fleet_state import Floats, Ints

SUFFIX = ".csv.gz"
RATE_CURVES = frozenset({"azure_2024_week_rates"})
"""Files of that folder that hold a rate over time and no requests."""
BLOCK_TOKENS = {"mooncake_conversation": 512, "mooncake_synthetic": 512, "agentic_coding_4h": 2048}
"""Length of the prefix blocks, in tokens, of the packaged traces that have them. Other files say it
in a column."""
SPREAD_S = {"mooncake_conversation": 3.0}
"""Arrivals that the source rounded down to this many seconds are spread evenly within them."""


@dataclass(frozen=True, slots=True)
class Trace:
    """N requests in the order of their arrival; every array has N elements."""

    name: str
    arrival_s: Floats
    """From 0, never falling."""
    prompt_tokens: Ints
    output_tokens: Ints
    prefixes: tuple[tuple[int, ...], ...] | None
    """Ids of each prompt's blocks, first one first; None where the source has none."""
    block_tokens: int
    """Tokens of one prefix block; 0 without prefixes."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    def head(self, requests: int) -> "Trace":
        """The first so many requests."""
        prefixes = self.prefixes[:requests] if self.prefixes is not None else None
        return Trace(
            self.name, self.arrival_s[:requests], self.prompt_tokens[:requests],
            self.output_tokens[:requests], prefixes, self.block_tokens,
        )  # fmt: skip

    def fitting(self, context_tokens_max: int) -> "Trace":
        """Without the requests that are longer, prompt and output together."""
        keep = np.flatnonzero(self.prompt_tokens + self.output_tokens <= context_tokens_max)
        prefixes = tuple(self.prefixes[i] for i in keep) if self.prefixes is not None else None
        return Trace(
            self.name, self.arrival_s[keep] - self.arrival_s[keep[:1]].sum(),
            self.prompt_tokens[keep], self.output_tokens[keep], prefixes, self.block_tokens,
        )  # fmt: skip

    def at_rate(self, requests_per_s: float) -> "Trace":
        """The same pattern of arrivals, squeezed or stretched to this mean rate."""
        factor = len(self) / max(self.duration_s, 1e-9) / requests_per_s
        return Trace(
            self.name, self.arrival_s * factor, self.prompt_tokens, self.output_tokens,
            self.prefixes, self.block_tokens,
        )  # fmt: skip


def trace_names() -> list[str]:
    """The traces that come with the package."""
    folder = resources.files("zerolayer.sim") / "data" / "traces"
    files = (entry.name for entry in folder.iterdir() if entry.name.endswith(SUFFIX))
    return sorted({name.removesuffix(SUFFIX) for name in files} - RATE_CURVES)


def load_trace(name_or_path: str) -> Trace:
    """A trace by its name, or a file of the same form. Raises ConfigError for anything else."""
    if name_or_path in trace_names():
        entry = resources.files("zerolayer.sim") / "data" / "traces" / (name_or_path + SUFFIX)
        with resources.as_file(entry) as path:
            return _read(path, name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        known = ", ".join(trace_names())
        raise ConfigError("--trace", name_or_path, f"give a CSV file, or one of {known}")
    return _read(path, path.name.removesuffix(SUFFIX))


def _read(path: Path, name: str) -> Trace:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", newline="") as lines:
            rows = list(csv.DictReader(lines))
        arrival = np.array([float(row["arrival_s"]) for row in rows])
        prompt = np.array([int(row["prompt_tokens"]) for row in rows])
        output = np.array([int(row["output_tokens"]) for row in rows])
        block_tokens = BLOCK_TOKENS.get(name) or _block_tokens(rows)
        prefixes = (
            tuple(_blocks(row["prefix_hashes"] or "") for row in rows) if block_tokens else None
        )
    except (KeyError, ValueError, OSError, EOFError) as cause:
        raise ConfigError("--trace", str(path), _wanted(cause)) from cause
    if len(rows) == 0 or (prompt < 1).any() or (output < 1).any() or (np.diff(arrival) < 0).any():
        raise ConfigError("--trace", str(path), _wanted("no rows, a count below 1, or unsorted"))
    for row, blocks in enumerate(prefixes or (), start=2):
        if (len(blocks) - 1) * block_tokens >= prompt[row - 2]:
            why = f"line {row} has {len(blocks)} blocks for {prompt[row - 2]} prompt tokens"
            raise ConfigError("--trace", str(path), _wanted(why))
    arrival = _spread(arrival, SPREAD_S.get(name, 0.0)) - arrival[0]
    return Trace(name, arrival, prompt, output, prefixes, block_tokens)


def _block_tokens(rows: list[dict[str, str]]) -> int:
    """Tokens of a prefix block, as a file says it in every row; 0 for a file without prefixes."""
    columns = rows[0].keys() if rows else ()
    if "block_tokens" not in columns:
        if "prefix_hashes" in columns:
            raise ValueError("prefix_hashes without block_tokens, the tokens of each block")
        return 0
    said = {int(row["block_tokens"]) for row in rows}
    if len(said) != 1 or min(said) < 1:
        raise ValueError(f"block_tokens is {sorted(said)}, not one number of at least 1")
    return said.pop()


def _blocks(line: str) -> tuple[int, ...]:
    """Ids of blocks; `7-9` stands for 7 8 9."""
    ids: list[int] = []
    for word in line.split():
        first, _, last = word.partition("-")
        ids.extend(range(int(first), int(last or first) + 1))
    return tuple(ids)


def _wanted(cause: object) -> str:
    return (
        f"it cannot be read as a trace ({cause}): wanted is a CSV with the columns arrival_s, "
        "prompt_tokens and output_tokens, counts of at least 1, sorted by arrival_s; for prompts "
        "that share their beginnings also block_tokens, the same in every row, and prefix_hashes, "
        "the ids of a prompt's blocks like 1 2 7-9"
    )


def _spread(arrival: Floats, seconds: float) -> Floats:
    """Spread equal arrival times evenly over the seconds that each of them stands for."""
    if seconds == 0.0:
        return arrival
    _, first, counts = np.unique(arrival, return_index=True, return_counts=True)
    places = np.arange(len(arrival)) - np.repeat(first, counts)
    spread: Floats = arrival + seconds * places / np.repeat(counts, counts)
    return spread
