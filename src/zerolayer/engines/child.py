"""What runs inside an engine process: vLLM's own EngineCore, with its life tied to the fleet's."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from zerolayer.engines.lifetime import STARTING_NICE, die_with_parent, end_if_orphaned, renice

#: Long enough that a message between two steps is met spinning, in seconds.
QUEUE_SPIN_S = 0.002
#: How often a reader that sleeps looks by itself, in milliseconds.
QUEUE_LOOK_MS = 10


def engine_main(
    *,
    fleet_pid: int,
    vllm_config: Any,
    handshake_address: str,
    log_path: str,
    environment: dict[str, str],
    scratch: Path,
) -> None:
    """Entry point of one engine (a fork of the fork server).

    A process group of its own keeps a terminal's Ctrl-C away from the engine: the serving process
    decides when engines end. Not a session of its own: Linux weighs sessions against each other
    (`sched_autogroup`), and with one per engine the serving process did not get a core for up to
    11 s while engines computed (`docs/figures.md`). Output goes to `log_path`, so that a crash
    leaves its last words.
    """
    os.setpgid(0, 0)
    die_with_parent(os.getppid())
    end_if_orphaned(fleet_pid)
    renice([os.getpid()], STARTING_NICE)
    _redirect_output(Path(log_path))
    os.environ.update(environment)
    keep_temporary_files_in(scratch)
    if vllm_config.device_config.device_type == "cpu":
        spin_briefly()
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor import Executor

    EngineCoreProc.run_engine_core(
        vllm_config=vllm_config,
        local_client=True,
        handshake_address=handshake_address,
        executor_class=Executor.get_class(vllm_config),
        log_stats=True,
    )


def keep_temporary_files_in(path: Path) -> None:
    """Let this process and those that it starts make temporary files there.

    vLLM makes a file for its process group and sockets for its queues under the system's directory,
    and a killed engine, or even one that ends in order, leaves them there: three per start. What
    torch compiles goes on to lie where the next start finds it.
    """
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.geteuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ["TMPDIR"] = tempfile.tempdir = str(path)


def spin_briefly() -> None:
    """Let the readers of vLLM's in-host queues sleep after `QUEUE_SPIN_S` instead of a second.

    On a CPU they spin on the cores that compute: an engine core while its worker runs a step, and
    every engine for a second after its last one. On two cores that made one step in a hundred take
    0.2 to 1.6 s, where it takes 40 ms without.

    A sleeping reader is woken through a socket that holds one wake-up and may drop the next before
    the first is acknowledged. Behind a second of spinning that hardly ever matters; here it could
    leave an engine asleep with a step to do, so a reader also looks every `QUEUE_LOOK_MS`.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (QUEUE_SPIN_S,)
    wait = SpinCondition.wait

    def wait_briefly(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, QUEUE_LOOK_MS if timeout_ms is None else min(timeout_ms, QUEUE_LOOK_MS))

    SpinCondition.wait = wait_briefly


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
