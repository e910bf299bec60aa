"""The two servers that are measured: a Zero-Layer fleet, and stock vLLM with data parallelism.

Both get the same words for vLLM and the same environment, so that what differs is the server.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from zerolayer.arena.runtime_dir import RuntimeDir
from zerolayer.bench import chaos_signals
from zerolayer.bench.server_process import (
    START_TIMEOUT_S,
    Progress,
    ServerCommand,
    ServerProcess,
    free_port,
    status_json,
)
from zerolayer.core.errors import EngineError

SERVED_NAME = "zerolayer-bench"
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 4096
#: Eager: no compilation at start, and the same kernels after each restart.
VLLM_ARGS = (
    "--served-model-name", SERVED_NAME,
    "--dtype", "bfloat16",
    "--enforce-eager",
    "--block-size", str(BLOCK_TOKENS),
    "--max-model-len", str(MAX_MODEL_LEN),
    "--max-num-seqs", "16",
    "--uvicorn-log-level", "warning",
    "--disable-uvicorn-access-log",
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",  # `zerolayer serve` sets it; stock vLLM must not lose by it
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: How long a killed engine may take to serve again, or a woken one to be admitted.
HEAL_TIMEOUT_S = 180.0
HEAL_POLL_S = 0.2
#: Processor time over this window tells which of stock vLLM's engines computes.
BUSY_WINDOW_S = 0.4


@dataclass(frozen=True)
class FleetOptions:
    """What to start."""

    model: str
    """A folder, or a hub name."""
    engines: int = 2
    snapshots: bool = True
    vllm_args: tuple[str, ...] = VLLM_ARGS
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to `ENVIRONMENT`."""
    log_dir: Path | None = None
    """Where logs go; a folder that is removed after a clean end when None."""
    start_timeout_s: float = START_TIMEOUT_S
    serve_args: tuple[str, ...] = ()
    """More words for `zerolayer serve` itself."""

    def command(self, title: str, argv: tuple[str, ...], port: int) -> ServerCommand:
        """The command line with the environment that both servers get."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        return ServerCommand(
            title=title,
            argv=argv,
            port=port,
            environment={**ENVIRONMENT, **offline, **self.environment},
            log_dir=self.log_dir,
            start_timeout_s=self.start_timeout_s,
        )


def sharing(engines: int, dev: Path = Path("/dev")) -> int:
    """How many engines must share a GPU here, so that a measurement needs no second one."""
    gpus = len(list(dev.glob("nvidia[0-9]*")))
    return -(-engines // gpus) if gpus else 1


class FleetProcess(ServerProcess):
    """`zerolayer serve` with all engines up."""

    def __init__(self, options: FleetOptions, on_progress: Progress = lambda line: None) -> None:
        self.options = options
        super().__init__(options.command("zerolayer serve", (), free_port()), on_progress)
        argv = (
            sys.executable, "-m", "zerolayer.cli", "serve", options.model,
            "--engines", str(options.engines),
            "--engines-per-gpu", str(sharing(options.engines)), "--host", "127.0.0.1",
            "--port", str(self.command.port), "--log-dir", str(self.log_dir / "engines"),
            "--snapshots" if options.snapshots else "--no-snapshots",
            *options.serve_args, "--", *options.vllm_args,
        )  # fmt: skip
        self.command = replace(self.command, argv=argv)
        self.instance = ""
        self._runtime_path: Path | None = None

    def _ready(self) -> tuple[bool, str]:
        health = self.get("/health").json()
        ready, total = health["engines_ready"], health["engines_total"]
        if ready == total and not self.instance:
            self._find_runtime()
        return ready == total, f"{ready} of {total} engines ready"

    def _find_runtime(self) -> None:
        status = self.status()
        self.instance = str(status["instance"])
        self._runtime_path = chaos_signals.runtime_of(status).path

    def log_tail(self) -> str:
        """The server's last lines and those of each engine."""
        engines = sorted((self.log_dir / "engines").glob("*.log"))
        tails = [f"--- {path} (end)\n{_last_lines(path)}" for path in engines]
        return "\n".join([super().log_tail(), *tails])

    def status(self) -> dict[str, Any]:
        """`GET /zerolayer/status`. Raises `httpx.HTTPError`."""
        return status_json(self.get("/zerolayer/status"))

    def runtime(self) -> RuntimeDir:
        """Its directory in shared memory."""
        assert self._runtime_path is not None
        return RuntimeDir.open(self._runtime_path)

    def signal_engine(self, engine: str, number: signal.Signals) -> int:
        """Signal all processes of an engine; returns to how many."""
        return chaos_signals.send(chaos_signals.engine_row(self.status(), engine), number)

    def kill(self, engine: str) -> int:
        """SIGKILL."""
        return self.signal_engine(engine, signal.SIGKILL)

    def stop(self, engine: str) -> int:
        """SIGSTOP: frozen, as a host that stopped answering."""
        return self.signal_engine(engine, signal.SIGSTOP)

    def cont(self, engine: str) -> int:
        """SIGCONT."""
        return self.signal_engine(engine, signal.SIGCONT)

    def order(self, engine: str, mode: str, factor: float = 1.0) -> None:
        """Board order `none`, `hang` or `slow` (`factor` times)."""
        slot = chaos_signals.engine_row(self.status(), engine)["slot"]
        chaos_signals.order(self.runtime(), slot, mode, factor)

    def wait_all_ready(self, timeout_s: float = HEAL_TIMEOUT_S) -> float:
        """Wait until every engine serves; returns the seconds. Raises `EngineError`."""
        began = time.monotonic()
        while not all_ready(status := self.status()):
            if time.monotonic() - began > timeout_s:
                raise EngineError(not_healed(status, timeout_s))
            time.sleep(HEAL_POLL_S)
        return time.monotonic() - began

    def _left_files(self) -> set[str]:
        runtime = {str(self._runtime_path)} if self._runtime_path is not None else set()
        return super()._left_files() | runtime


class PlainVllm(ServerProcess):
    """Stock `vllm serve MODEL --data-parallel-size N`."""

    def __init__(self, options: FleetOptions, on_progress: Progress = lambda line: None) -> None:
        port = free_port()
        argv = (
            sys.executable, "-m", "zerolayer.bench.stock_vllm", "serve", options.model,
            "--host", "127.0.0.1", "--port", str(port),
            "--data-parallel-size", str(options.engines), *options.vllm_args,
        )  # fmt: skip
        super().__init__(options.command("vllm serve", argv, port), on_progress)

    def _ready(self) -> tuple[bool, str]:
        up = self.get("/health").status_code == httpx.codes.OK
        return up, "ready" if up else "loading"

    def engine_cores(self) -> list[psutil.Process]:
        """The engine cores of its tree, by pid."""
        cores = []
        for row in self.tree():
            if "EngineCore" in row.name or "EngineCor" in _title(row.pid):
                cores.append(psutil.Process(row.pid))
        return sorted(cores, key=lambda process: process.pid)

    def kill_busiest_engine(self, sleep: Callable[[float], None] = time.sleep) -> int:
        """SIGKILL the engine (core and workers) that used most processor time just now.

        Blocks for `BUSY_WINDOW_S`; returns how many processes it was. Raises `EngineError`.
        """
        trees = [[core, *core.children(recursive=True)] for core in self.engine_cores()]
        if not trees:
            raise EngineError(f"no engine core found under vllm serve (pid {self.pid})")
        before = [_cpu_s(tree) for tree in trees]
        sleep(BUSY_WINDOW_S)
        used = [_cpu_s(tree) - past for tree, past in zip(trees, before, strict=True)]
        victims = trees[used.index(max(used))]
        for process in victims:
            process.send_signal(signal.SIGKILL)
        return len(victims)


def all_ready(status: dict[str, Any]) -> bool:
    """Whether every engine of the fleet serves and none is under suspicion."""
    return all(row["state"] == "ready" for row in status["engines"])


def not_healed(status: dict[str, Any], timeout_s: float) -> str:
    """What to say of a fleet that did not come back."""
    rows = [
        f"{row['id']} is {row['state']} (last fault: {row['last_fault'] or 'none'})"
        for row in status["engines"]
        if row["state"] != "ready"
    ]
    return f"not all engines were back after {timeout_s:.0f} s: {'; '.join(rows)}"


def _cpu_s(tree: list[psutil.Process]) -> float:
    total = 0.0
    for process in tree:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def _title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def _last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-10:])
