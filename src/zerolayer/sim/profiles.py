"""How long an engine's steps take and how much KV it holds, from the tables in `data/profiles`.

A step that decodes n streams with C context tokens together, and computes p prompt tokens of which
`start` come before, takes

    dense(n + p) + a(n) * C + q * p * (start + p / 2)

`dense` is everything that is done per token of the batch (matrix products, all-reduce): one
function of the tokens in the step, because prompt tokens ride on the weights that the decoding
streams read anyway (Sarathi-Serve, Agrawal et al., OSDI 2024, section 4). Up to the largest
measured batch it is the decode table extrapolated to no context, as a running maximum over the
batch; above, the prefill table less its attention. `a` is decode attention, linear in the context;
`q` is prefill attention. All of it is multiplied by ENGINE_FACTOR, as the tables' README says.
"""

import csv
import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np

from zerolayer.core.errors import ConfigError
from zerolayer.core.fleet_state import Floats
from zerolayer.dispatch.cost import CostPrior

ENGINE_FACTOR = 1.2
"""Norms, sampling and host gaps, which the composed tables leave out (`data/profiles/README`)."""
MEMORY_SHARE = 0.9
"""vLLM's `gpu_memory_utilization`."""
ACTIVATIONS_GIB = 2.0
"""Per GPU, for activations and captured graphs: what vLLM leaves out of the KV cache beside the
weights. An assumption."""
RESTORE_BYTES_PER_S = 20e9
"""Snapshot pages into a GPU: a pinned host copy over PCIe 5 x16 (64 GB/s nominal), with room for
the gather. An assumption; on CPU engines 79 MB (3,500 tokens) take about 20 ms."""
RESTORE_S = 0.002
"""To find the pages and start the copy."""
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its memory."""

    parameters: float
    kv_bytes_per_token: int
    """Keys and values of all layers: 2 * layers * KV heads * head size * 2 bytes."""
    context_tokens_max: int


MODELS = {
    "llama-3.1-8b": ModelShape(8.03e9, 2 * 32 * 8 * 128 * 2, 131_072),
    "llama-3.1-70b": ModelShape(70.6e9, 2 * 80 * 8 * 128 * 2, 131_072),
    "qwen3-32b": ModelShape(32.8e9, 2 * 64 * 8 * 128 * 2, 40_960),
}
MEMORY_GIB = {
    "a100-sxm-80gb": 80.0,
    "h100-sxm-80gb": 80.0,
    "h200-sxm-141gb": 141.0,
    "b200-sxm-180gb": 180.0,
    "l40s-48gb": 48.0,
    "rtx-pro-6000-96gb": 96.0,
}
LARGE_DEFAULTS = frozenset({"h100-sxm-80gb", "h200-sxm-141gb", "rtx-pro-6000-96gb"})
"""GPUs on which vLLM's server starts with 1024 streams and 8192 tokens a step (70 GiB and more,
but not A100); from 160 GiB on with 16384, otherwise with 256 and 2048 (vLLM 0.32 `arg_utils`)."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What hardware and model the engines are; names as in `data/profiles`."""

    gpu: str = "h100-sxm-80gb"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class FittedEngine:
    """An engine that is described by what a cost model learned of it: seconds of a step =
    b0 + b1*prefill + b2*decodes + b3*context + b4*prefill^2, in tokens and streams."""

    b: tuple[float, float, float, float, float]
    kv_tokens: int
    requests_max: int = 256
    batch_tokens: int = 2048
    context_tokens_max: int = 8192
    kv_bytes_per_token: int = 22_500
    restore_bytes_per_s: float = 4e9
    restart_s: tuple[float, float] = (6.0, 20.0)
    """Median and 99th percentile of the time until a restarted engine serves."""


@dataclass(frozen=True)
class EngineProfile:
    """Everything the engine model needs, as tables in seconds that are only indexed."""

    name: str
    decode_s: tuple[float, ...]
    """dense(n) for n = 0 .. requests_max; 0 for n = 0."""
    context_s: tuple[float, ...]
    """Seconds per context token at n streams, n = 0 .. requests_max."""
    work_s: tuple[float, ...]
    """dense(m) for m = 0 .. batch_tokens + requests_max; 0 for m = 0."""
    attention_s: float
    """q: seconds per pair of prompt token and token before it."""
    kv_tokens: int
    requests_max: int
    batch_tokens: int
    context_tokens_max: int
    restore_s_per_token: float
    gpus: int
    restart_s: tuple[float, float]
    fit_error: tuple[float, float]
    """Median and largest relative error of the formula against the decode table; 0 if fitted."""

    def step_s(self, prefill: int, start: int, decodes: int, context: int) -> float:
        """Seconds of one step at nominal speed; see the module's docstring."""
        seconds = self.decode_s[decodes] + self.context_s[decodes] * context
        if prefill:
            seconds += self.work_s[decodes + prefill] - self.work_s[decodes]
            seconds += self.attention_s * prefill * (start + 0.5 * prefill)
        return seconds

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute a prompt on an empty engine, in chunks of `batch_tokens`."""
        seconds, start = 0.0, 0
        while start < tokens:
            chunk = min(self.batch_tokens, tokens - start)
            seconds += self.step_s(chunk, start, 0, 0)
            start += chunk
        return seconds

    def prior(self) -> CostPrior:
        """The fleet's nominal hardware as a cost model's starting point: what an operator knows.
        How far an engine is from it has to be learned."""
        chunk = min(2048, self.batch_tokens)
        step_s = self.decode_s[1]
        prefill = max(0.0, self.work_s[chunk] - step_s) / chunk * 1e3
        many = min(256, self.requests_max)
        ten = (self.decode_s[many] - step_s) / many * 10.0
        context = self.context_s[many] * 1e3
        squared = 0.5 * self.attention_s * 1e6
        return CostPrior(
            step_s, 0.5 * step_s, prefill, 0.5 * prefill, ten, 0.5 * ten + 1e-5,
            context, 0.5 * context + 1e-6, squared, 0.5 * squared + 1e-5,
        )  # fmt: skip


@lru_cache(maxsize=32)
def profile_of(kind: EngineKind | FittedEngine) -> EngineProfile:
    """The profile of a kind of engine. Raises ConfigError for one that the tables do not have."""
    return _fitted(kind) if isinstance(kind, FittedEngine) else _from_tables(kind)


def _fitted(kind: FittedEngine) -> EngineProfile:
    b0, b1, b2, b3, b4 = kind.b
    many = kind.requests_max + 1
    return EngineProfile(
        name="fitted",
        decode_s=(0.0, *(b0 + b2 * n for n in range(1, many))),
        context_s=(b3,) * many,
        work_s=(0.0, *(b0 + b1 * m for m in range(1, kind.batch_tokens + many))),
        attention_s=2.0 * b4,
        kv_tokens=kind.kv_tokens,
        requests_max=kind.requests_max,
        batch_tokens=kind.batch_tokens,
        context_tokens_max=min(kind.context_tokens_max, kind.kv_tokens),
        restore_s_per_token=kind.kv_bytes_per_token / kind.restore_bytes_per_s,
        gpus=1,
        restart_s=kind.restart_s,
        fit_error=(0.0, 0.0),
    )


def _from_tables(kind: EngineKind) -> EngineProfile:
    decode = _rows("decode_step_composed", kind, ("batch_size", "context_tokens", "step_ms"))
    prefill = _rows("prefill_composed", kind, ("prompt_tokens", "prefill_ms"))
    shape = MODELS[kind.model]
    memory_gib = MEMORY_GIB[kind.gpu]
    large = kind.gpu in LARGE_DEFAULTS or memory_gib >= 160.0
    requests_max = 1024 if large else 256
    batch_tokens = (16_384 if memory_gib >= 160.0 else 8192) if large else 2048
    free = memory_gib * MEMORY_SHARE - ACTIVATIONS_GIB
    kv_bytes = free * _GIB * kind.tensor_parallel - 2.0 * shape.parameters
    kv_tokens = int(kv_bytes / shape.kv_bytes_per_token)
    batches, floors, slopes = _decode_lines(decode)
    quadratic = _attention(prefill)
    dense = _dense(batches, floors, prefill, quadratic, requests_max + batch_tokens)
    streams = np.arange(requests_max + 1)
    dense_s = dense * ENGINE_FACTOR * 1e-3
    context_s = np.interp(streams, batches, slopes) * ENGINE_FACTOR * 1e-3
    predicted = np.interp(decode[:, 0], batches, floors)
    predicted += np.interp(decode[:, 0], batches, slopes) * decode[:, 0] * decode[:, 1]
    errors = np.abs(predicted / decode[:, 2] - 1.0)
    big = kind.model == "llama-3.1-70b"
    return EngineProfile(
        name=f"{kind.gpu} {kind.model} tp{kind.tensor_parallel}",
        decode_s=tuple(dense_s[: requests_max + 1].tolist()),
        context_s=tuple(context_s.tolist()),
        work_s=tuple(dense_s.tolist()),
        attention_s=quadratic * ENGINE_FACTOR * 1e-3,
        kv_tokens=kv_tokens,
        requests_max=requests_max,
        batch_tokens=batch_tokens,
        context_tokens_max=min(shape.context_tokens_max, kv_tokens - 1024),
        restore_s_per_token=shape.kv_bytes_per_token / (RESTORE_BYTES_PER_S * kind.tensor_parallel),
        gpus=kind.tensor_parallel,
        restart_s=(150.0, 600.0) if big else (50.0, 180.0),
        fit_error=(float(np.median(errors)), float(errors.max())),
    )


def _decode_lines(decode: Floats) -> tuple[Floats, Floats, Floats]:
    """Per measured batch: floor and slope of step_ms over total context, by least squares on the
    relative error. A batch that was measured at one context only says nothing of the slope."""
    batches, floors, slopes = [], [], []
    for batch in np.unique(decode[:, 0]):
        rows = decode[decode[:, 0] == batch]
        if len(rows) < 2:
            continue
        design = np.stack([np.ones(len(rows)), batch * rows[:, 1]], axis=1) / rows[:, 2:3]
        (floor, slope), *_ = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)
        batches.append(batch)
        floors.append(max(floor, 0.0))
        slopes.append(max(slope, 0.0))
    return np.array(batches), np.maximum.accumulate(np.array(floors)), np.array(slopes)


def _attention(prefill: Floats) -> float:
    """q in ms, from prompts of 4,096 tokens and more: prefill_ms = c * p + q * p^2 / 2."""
    rows = prefill[prefill[:, 0] >= 4096]
    design = np.stack([rows[:, 0], 0.5 * rows[:, 0] ** 2], axis=1) / rows[:, 1:2]
    (_, quadratic), *_ = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)
    return max(0.0, float(quadratic))


def _dense(
    batches: Floats, floors: Floats, prefill: Floats, quadratic: float, tokens_max: int
) -> Floats:
    """dense(m) in ms for m = 0 .. tokens_max, growing with m; 0 for 0."""
    above = prefill[(prefill[:, 0] > batches[-1]) & (prefill[:, 0] <= 8192)]
    linear = above[:, 1] - 0.5 * quadratic * above[:, 0] ** 2
    knots = np.concatenate([batches, above[:, 0]])
    values = np.maximum.accumulate(np.concatenate([floors, linear]))
    dense: Floats = np.interp(np.arange(tokens_max + 1), knots, values)
    slope = values[-1] / knots[-1]
    beyond = np.arange(int(knots[-1]), tokens_max + 1)
    dense[int(knots[-1]) :] = values[-1] + slope * (beyond - knots[-1])
    dense[0] = 0.0
    return dense


def _rows(table: str, kind: EngineKind, columns: Sequence[str]) -> Floats:
    """The rows of this kind, as numbers."""
    key = (kind.gpu, kind.model, str(kind.tensor_parallel))
    rows = [[float(row[column]) for column in columns] for row in _read(table) if _key(row) == key]
    if not rows:
        known = ", ".join(sorted({" ".join(_key(row)) for row in _read(table)}))
        raise ConfigError("engine kind", " ".join(key), f"give one of: {known}")
    return np.array(rows)


def _key(row: dict[str, str]) -> tuple[str, str, str]:
    return row["gpu"], row["model"], row["tensor_parallel"]


def _read(table: str) -> Iterable[dict[str, str]]:
    entry = resources.files("zerolayer.sim") / "data" / "profiles" / f"{table}.csv.gz"
    with resources.as_file(entry) as path, gzip.open(path, "rt", newline="") as lines:
        yield from csv.DictReader(lines)
