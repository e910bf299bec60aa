"""New vLLM arguments for a roll: parsed and checked in full before an engine is touched.

The server itself is not restarted by a roll. So only what engines alone read may change; what the
server read at its own start (model, tokenizer, context length, names, parsers) is refused.
"""

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import AsyncEngineArgs

from zerolayer.app.vllm_words import ServeOptions, engine_config, parse_vllm_args
from zerolayer.core.errors import ConfigError
from zerolayer.engines.rolling import NewArguments

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

#: What a snapshot means depends on these: one made under another value is refused by its
#: fingerprint, and the stream is computed again.
MEANING = frozenset(
    {
        "attention_backend", "attention_config", "block_size", "dtype", "kv_cache_dtype",
        "pipeline_parallel_size", "quantization", "tensor_parallel_size",
    }
)  # fmt: skip
#: What an engine reads for itself.
ENGINE_ALONE = MEANING | {
    "async_scheduling", "compilation_config", "cpu_offload_gb", "cudagraph_capture_sizes",
    "disable_cascade_attn", "disable_custom_all_reduce", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "load_format", "long_prefill_token_threshold",
    "max_cudagraph_capture_size", "max_num_batched_tokens",
    "max_num_seqs", "max_parallel_loading_workers",
    "model_loader_extra_config", "num_gpu_blocks_override", "optimization_level",
    "performance_mode", "prefix_caching_hash_algo", "safetensors_load_strategy",
    "scheduler_reserve_full_isl", "scheduling_policy", "use_tqdm_on_load", "worker_cls",
}  # fmt: skip


async def configure(fleet: "Fleet", options: ServeOptions, words: Sequence[str]) -> NewArguments:
    """Lay `words` over those in force. Raises `ConfigError`; takes some seconds, in a thread."""
    loop = asyncio.get_running_loop()
    old, new = tuple(fleet.arguments), (*fleet.arguments, *words)
    arguments = await loop.run_in_executor(None, configured, options, old, new)
    fleet.settings.gpus.require_same_size(arguments.config)
    return arguments


def configured(options: ServeOptions, old: tuple[str, ...], new: tuple[str, ...]) -> NewArguments:
    """`new` words against the `old` ones that are in force. Raises `ConfigError`."""
    before = _parsed(dataclasses.replace(options, vllm_args=old))
    after = _parsed(dataclasses.replace(options, vllm_args=new))
    changed = changes(before, after)
    return NewArguments(
        words=new,
        config=engine_config(after, "vLLM arguments", " ".join(new[len(old) :])),
        changed=changed,
        recomputed=bool(MEANING.intersection(changed)),
    )


def changes(before: argparse.Namespace, after: argparse.Namespace) -> tuple[str, ...]:
    """Names of the settings that differ. Raises `ConfigError` for one that the server reads too."""
    old, new = vars(before), vars(after)
    changed = tuple(sorted(name for name in new if new[name] != old.get(name)))
    for name in changed:
        if name not in ENGINE_ALONE:
            raise ConfigError(
                f"--{name.replace('_', '-')}", new[name],
                "a roll restarts engines, and the server itself reads this one; end it and start "
                "zerolayer serve with it",
            )  # fmt: skip
    return changed


def _parsed(options: ServeOptions) -> argparse.Namespace:
    return parse_vllm_args(options, on_error=_refuse)


def _refuse(message: str) -> Any:
    raise ConfigError("vLLM arguments", message, "give what `vllm serve --help` knows")


def unknown_names() -> frozenset[str]:
    """Names in ENGINE_ALONE that this vLLM has not; for the test that keeps the list true."""
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    return frozenset(ENGINE_ALONE - fields)
