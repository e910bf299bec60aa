"""Words for vLLM: parsed by its own parser, with what Zero-Layer decides laid over them."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.choices import PlacementChoices
from zerolayer.engines import gpus
from zerolayer.engines.fleet import connector_config
from zerolayer.gateway.placement import PlacementHeaders
from zerolayer.gateway.sse import NoDoneAfterError


@dataclass(frozen=True)
class ServeOptions:
    """What `zerolayer serve` was asked for."""

    model: str
    """Path of a model folder, or a hub name."""
    engines: int
    host: str
    port: int
    snapshots: bool
    snapshot_bytes: int
    """Largest arena per engine and rank, in bytes."""
    wait_for_engine_s: float
    """How long a stream waits when no engine is left."""
    log_dir: Path
    vllm_args: tuple[str, ...]
    """Passed to vLLM's own parser."""
    environment: Mapping[str, str]
    """Set in each engine's process before vLLM starts."""
    offload: bool = True
    """Move streams off an engine before it is too full or too slow."""
    placement: PlacementChoices = field(default_factory=PlacementChoices)
    """How engines are chosen for streams."""
    engines_per_gpu: int = 1
    """How many engines may share a GPU; without GPUs it means nothing."""
    remote_admin: bool = False
    """Answer orders (drain, roll, scale, back) from other machines too."""


def parse_vllm_args(
    options: ServeOptions, on_error: Callable[[str], NoReturn] | None = None
) -> argparse.Namespace:
    """vLLM's own arguments, with what Zero-Layer decides already in them.

    `on_error` gets what the parser says of a wrong word; without it the process ends, as commands
    do.
    """
    parser = make_arg_parser(FlexibleArgumentParser(prog="zerolayer serve MODEL --"))
    if on_error is not None:
        parser.error = on_error
    gpus.divide_memory(parser, options.engines_per_gpu, current_platform)
    words = ["--host", options.host, "--port", str(options.port), *options.vllm_args]
    if current_platform.is_cpu() and not _given("--block-size", options.vllm_args):
        words += ["--block-size", "32"]
    args: argparse.Namespace = parser.parse_args([options.model, *words])
    args.model = options.model
    ours = (NoDoneAfterError, PlacementHeaders)
    args.middleware = [*args.middleware, *(f"{kind.__module__}.{kind.__name__}" for kind in ours)]
    validate_parsed_serve_args(args)
    gpus.require_memory(args, options.engines_per_gpu, current_platform)
    for name in ("data_parallel_size", "api_server_count"):
        if (getattr(args, name, None) or 1) > 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                getattr(args, name),
                "leave it out: the fleet's size is --engines",
            )
    return args


def _given(flag: str, words: tuple[str, ...]) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in words)


def engine_config(args: argparse.Namespace, field: str, value: str) -> Any:
    """vLLM's config. What vLLM says of a wrong model or word becomes one sentence about `field` and
    its `value`."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if engine_args.kv_transfer_config is not None:
        raise ConfigError(
            "--kv-transfer-config",
            engine_args.kv_transfer_config.kv_connector,
            "leave it out: Zero-Layer uses vLLM's connector slot for its own snapshots",
        )
    engine_args.kv_transfer_config = connector_config()
    gpus.take_device_ids(engine_args, current_platform)
    try:
        return engine_args.create_engine_config()
    except (ValueError, OSError) as cause:
        raise ConfigError(
            field, value, f"vLLM cannot use it with these arguments: {_one_line(cause)}"
        ) from cause


def fleet_gpus(args: argparse.Namespace, options: ServeOptions, config: Any) -> gpus.Gpus:
    """Those that the fleet may use. Raises `ConfigError` when its engines do not find enough."""
    chosen = options.environment.get(gpus.CHOSEN_GPUS, "")
    found = gpus.find_gpus(
        config, chosen, args.device_ids, options.engines_per_gpu, current_platform
    )
    found.require("--engines", options.engines)
    return found


def _one_line(cause: Exception) -> str:
    """What an exception of vLLM or pydantic says, without the places where it was said."""
    if isinstance(cause, ValidationError):
        errors = {".".join(map(str, error["loc"])): error["msg"] for error in cause.errors()}
        said = "; ".join(f"{where}: {what}" if where else what for where, what in errors.items())
    else:
        said = " ".join(str(cause).split()) or repr(cause)
    return said[:400]
