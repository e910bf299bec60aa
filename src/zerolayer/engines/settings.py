"""What the serving process tells a connector, through vLLM's `kv_connector_extra_config`."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from zerolayer.arena.layout import ArenaGeometry

CONFIG_KEY = "zerolayer"
#: Streams that may have a snapshot in one engine at a time.
SLOTS_PER_ENGINE = 1024
#: Whole blocks that one step may copy beside those that it computes: about 6 MB for the small
#: packaged model (1-2 ms).
FULL_BLOCKS_PER_STEP = 8


class ConnectorSettings(msgspec.Struct, frozen=True):
    """One engine's share of the fleet's settings."""

    engine: str  # "e0"
    incarnation: int
    runtime_dir: str
    board: str  # path of the engine's board table
    snapshots: bool = True
    arena_bytes: int = 1 << 30  # per rank
    full_blocks_per_step: int = FULL_BLOCKS_PER_STEP

    def arena_path(self, rank: int) -> Path:
        """Where this engine's arena of a tensor-parallel rank lies."""
        return Path(self.runtime_dir) / f"arena-{self.engine}-{self.incarnation}-r{rank}.kv"

    def off_note(self) -> Path:
        """A text file that says why this engine keeps no snapshots, if it does not."""
        return Path(self.runtime_dir) / f"arena-{self.engine}-{self.incarnation}.off"


def settings_of(vllm_config: Any) -> ConnectorSettings:
    """The settings inside an engine's vLLM config."""
    raw = vllm_config.kv_transfer_config.kv_connector_extra_config[CONFIG_KEY]
    return msgspec.convert(raw, ConnectorSettings)


def rank_path(rank0: str, rank: int) -> Path:
    """The arena of another rank beside one of rank 0."""
    return Path(rank0.removesuffix("-r0.kv") + f"-r{rank}.kv")


def unsupported_reason(kv_cache_config: Any) -> str | None:
    """Why snapshots cannot work for this model's KV cache, or None when they can."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups; snapshots need exactly one"
    name = type(groups[0].kv_cache_spec).__name__
    if name not in ("FullAttentionSpec", "MLAAttentionSpec"):
        return f"the KV cache is of kind {name}; snapshots need full attention"
    return None


def arena_geometry(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings
) -> ArenaGeometry:
    """The arena's geometry; scheduler and worker derive the same one from the same config.

    The arena is never larger than the engine's own KV cache. Raises `ConfigError` when the
    budget holds no page.
    """
    group = kv_cache_config.kv_cache_groups[0]
    block_tokens = group.kv_cache_spec.block_size
    page_bytes = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
    geometry = ArenaGeometry.for_budget(
        settings.arena_bytes,
        page_bytes,
        slot_count=SLOTS_PER_ENGINE,
        pages_per_stream_max=-(-vllm_config.model_config.max_model_len // block_tokens),
        block_tokens=block_tokens,
    )
    if geometry.page_count <= kv_cache_config.num_blocks:
        return geometry
    return ArenaGeometry(
        geometry.page_bytes,
        kv_cache_config.num_blocks,
        geometry.slot_count,
        geometry.pages_per_stream_max,
        geometry.block_tokens,
    )


def fingerprint(vllm_config: Any, kv_cache_config: Any, rank: int, backend: str) -> bytes:
    """32 bytes that are equal only where KV pages mean the same.

    Weights, dtype, block size, parallel layout, attention backend and vLLM version are in it; a
    snapshot under another fingerprint is refused, and the stream is computed again instead.
    """
    from zerolayer.engines.version import installed_vllm

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    facts = (
        installed_vllm(), model.model, model.revision, _weights_identity(Path(model.model)),
        str(model.dtype), vllm_config.cache_config.cache_dtype, model.quantization,
        repr(group.kv_cache_spec), tuple(group.layer_names), rank,
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend,
    )  # fmt: skip
    return hashlib.blake2b(repr(facts).encode(), digest_size=32).digest()


def _weights_identity(model: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each weight file of a local model; empty for a hub name."""
    if not model.is_dir():
        return []
    files = sorted(model.glob("*.safetensors"))
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
