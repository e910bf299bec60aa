"""The environment, read and written: where files go, and how vLLM is told what we want of it."""

import os
import re
import shutil
from collections.abc import Mapping, MutableMapping
from datetime import datetime
from pathlib import Path

#: Log folders that are kept in the default place; starting once more removes the oldest.
LOG_FOLDERS_KEPT = 20
_LOG_FOLDER = re.compile(r"\d{8}-\d{6}(-\d+)?")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where models are kept: `$XDG_CACHE_HOME` or `~/.cache`."""
    return _xdg(environ, "XDG_CACHE_HOME", Path(".cache"))


def new_log_dir(now: datetime, environ: Mapping[str, str] = os.environ) -> Path:
    """A folder of this start's own under `$XDG_STATE_HOME` or `~/.local/state`; not made yet.

    Removes the oldest ones there beyond `LOG_FOLDERS_KEPT`.
    """
    logs = _xdg(environ, "XDG_STATE_HOME", Path(".local/state")) / "zerolayer" / "logs"
    _remove_oldest(logs)
    name = f"{now:%Y%m%d-%H%M%S}"
    return logs / name if not (logs / name).exists() else logs / f"{name}-{os.getpid()}"


def nvidia_present(dev: Path = Path("/dev")) -> bool:
    """Whether the kernel offers an NVIDIA device; tells without importing anything."""
    return any(dev.glob("nvidia[0-9]*")) or (dev / "nvidiactl").exists()


def chosen_gpus(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The user's choice of GPUs, which the engines get and whose counters are read; empty where
    there is none. An empty value is none, as vLLM sees it."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}


def set_vllm_defaults(
    *, verbose: bool, packaged_model: bool, nvidia: bool,
    environ: MutableMapping[str, str] = os.environ,
) -> None:  # fmt: skip
    """What vLLM reads at its import, where the user has not said otherwise."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the forks of an engine
    }
    if not verbose:
        defaults["VLLM_LOGGING_LEVEL"] = "WARNING"
    if packaged_model:
        defaults["HF_HUB_OFFLINE"] = "1"
    if not nvidia:
        defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB per engine
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # engines share the cores
        defaults["OMP_WAIT_POLICY"] = "PASSIVE"  # so a thread that waits must not hold one
    for name, value in defaults.items():
        environ.setdefault(name, value)


def _xdg(environ: Mapping[str, str], variable: str, below_home: Path) -> Path:
    """The folder that a variable names; XDG says that a relative one is to be ignored."""
    named = Path(environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / below_home


def _remove_oldest(logs: Path) -> None:
    """Only folders with names that we give: what else lies there is not ours."""
    if not logs.is_dir():
        return
    ours = sorted(path for path in logs.iterdir() if _LOG_FOLDER.fullmatch(path.name))
    for folder in ours[: max(0, len(ours) - LOG_FOLDERS_KEPT + 1)]:
        shutil.rmtree(folder, ignore_errors=True)
