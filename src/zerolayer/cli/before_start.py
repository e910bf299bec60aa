"""What can be wrong with a start, found before anything heavy is imported or started.

Each check raises `ConfigError` with the option, its value and the fix.
"""

import errno
import os
import re
import shutil
import socket
from pathlib import Path

from zerolayer.core.errors import ConfigError, ZeroLayerError
from zerolayer.core.limits import ENGINES_MAX, ENGINES_PER_GPU_MAX
from zerolayer.dispatch.choices import Domains, parse_domains

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_engines(engines: int, engines_per_gpu: int) -> None:
    """Both inside their ranges. Whether the machine has so many GPUs only vLLM can tell."""
    if not 1 <= engines <= ENGINES_MAX:
        raise ConfigError("--engines", engines, f"give a whole number from 1 to {ENGINES_MAX}")
    if not 1 <= engines_per_gpu <= ENGINES_PER_GPU_MAX:
        most = ENGINES_PER_GPU_MAX
        raise ConfigError("--engines-per-gpu", engines_per_gpu, f"give 1 to {most} engines")


def check_numbers(port: int, snapshot_gib: float, wait_for_engine_s: float) -> None:
    """Every number inside its range."""
    if not 1 <= port <= 65_535:
        raise ConfigError("--port", port, "give a port from 1 to 65535")
    if not 0.001 <= snapshot_gib <= 100_000:
        raise ConfigError("--snapshot-gib", snapshot_gib, "give GiB per engine, 0.001 to 100000")
    if not 0 <= wait_for_engine_s <= 86_400:
        raise ConfigError("--wait-for-engine", wait_for_engine_s, "give seconds, 0 to 86400")


def check_policy(name: str) -> str:
    """A way to choose that there is."""
    from zerolayer.dispatch.policies.registry import POLICIES

    if name not in POLICIES:
        raise ConfigError("--policy", name, f"write one of: {', '.join(POLICIES)}")
    return name


def check_domains(text: str, engines: int) -> Domains:
    """Domains as `parse_domains` reads them. A domain without an engine of the start is a mistake;
    one that also names later slots is a fleet that will grow."""
    domains = parse_domains(text)
    for domain in domains:
        if min(domain.slots) >= engines:
            raise ConfigError("--domains", text, f"this fleet has slots 0 to {engines - 1}")
    return domains


def check_model(model: str) -> str:
    """A model folder, a .gguf file or a hub name, as vLLM wants it."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError("MODEL", model, "this folder has no config.json, so it is no model")
        return str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError("MODEL", model, "this is a file; name the folder of the model")
        return str(path)
    if model.startswith(("/", ".", "~")):
        raise ConfigError("MODEL", model, "no such folder")
    if not _HUB_NAME.fullmatch(model):
        raise ConfigError("MODEL", model, "give a folder, or a hub name like owner/name")
    return model


def check_port_free(host: str, port: int) -> None:
    """Nobody listens there. (Another program may still take it before the server does; the
    server then says the same.)"""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as cause:
        raise ConfigError("--host", host, "no such address on this machine") from cause
    except OSError as cause:
        raise _why_not_bound(host, port, cause) from cause


def _why_not_bound(host: str, port: int, cause: OSError) -> ConfigError:
    if cause.errno == errno.EADDRINUSE:
        return ConfigError(
            "--port", port, f"another program listens on {host}:{port}; choose one with --port"
        )
    if cause.errno == errno.EACCES:
        return ConfigError("--port", port, "not yours to open; choose one above 1023")
    return ConfigError("--host", host, f"cannot listen there: {cause.strerror}")


def check_shared_memory(shm: Path) -> None:
    """There is a writable tmpfs for the fleet's files."""
    if not shm.is_dir():
        raise ZeroLayerError(
            f"{shm} does not exist, and Zero-Layer keeps its tables there; "
            f"fix: mount -t tmpfs tmpfs {shm}"
        )
    if not os.access(shm, os.W_OK | os.X_OK):
        raise ZeroLayerError(f"{shm} is not writable for you; fix: chmod 1777 {shm}")


def snapshot_room_note(shm: Path, engines: int, snapshot_bytes: int) -> str | None:
    """A warning when the tmpfs is smaller than all snapshots at their largest, else None."""
    needed, free = engines * snapshot_bytes, shutil.disk_usage(shm).free
    if needed <= free:
        return None
    return (
        f"snapshots may need up to {needed / 2**30:.1f} GiB and {shm} has {free / 2**30:.1f} GiB "
        "free: an engine that finds no room runs without them (lower --snapshot-gib, or enlarge "
        "it; with Docker: --shm-size)"
    )


def check_log_dir(log_dir: Path) -> None:
    """The engines can write their logs."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError("--log-dir", str(log_dir), f"cannot be made: {cause.strerror}") from cause
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise ConfigError("--log-dir", str(log_dir), "not writable for you")
