"""Imported once by the fork server, so that every engine starts with vLLM already in memory.

Importing vLLM takes most of an engine's start on a CPU. The fork server imports it once, and
each engine (first start and restart alike) is a fork of it. The fork server dies with the
serving process, and engines die with the fork server: no engine outlives its fleet, not even a
stopped one, because the kernel delivers the death signal.

This module acts on import: the standard library's fork server offers no other hook.
"""

import importlib
import multiprocessing.forkserver
import os
import sys

from zerolayer.engines.lifetime import die_with_parent

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.worker_base",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.structured_output",
    "zerolayer.engines.connector",
)

#: Worker modules that import only on their own platform; the others are skipped.
PLATFORM_MODULES = {
    "cpu": ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn"),
    "cuda": ("vllm.v1.worker.gpu_worker",),
}


def _import_engine_modules() -> None:
    for name in MODULES:
        importlib.import_module(name)
    from vllm.platforms import current_platform

    for name in PLATFORM_MODULES.get(current_platform.device_type, ()):
        importlib.import_module(name)


def _inside_fork_server() -> bool:
    main = sys.modules.get("__main__")
    return getattr(main, "__file__", None) is None and "-c" in sys.argv[:1]


if _inside_fork_server():
    die_with_parent(os.getppid())
    _import_engine_modules()

#: What a launcher passes to `set_forkserver_preload`.
PRELOAD = [__name__]
ensure_running = multiprocessing.forkserver.ensure_running
