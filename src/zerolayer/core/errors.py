"""Every error that Zero-Layer raises on purpose, in one tree.

    ZeroLayerError
    ├── ConfigError          a setting is wrong: names the field, the value and the fix
    ├── ArenaError           an arena file or the runtime directory cannot be used
    │   ├── ArenaSpaceError  not enough room in shared memory: needed, free, and the fix
    │   └── RuntimeDirError  the runtime directory is not safely ours
    ├── TableError           a shared table cannot be used
    ├── EngineError          an engine could not be started or failed for good
    └── SimulationError      a simulated run could not be done

Our own bugs are assertions, expected results are return values; these are the world's faults. An
exception of a library is mapped once, where it is caught, with `raise ... from cause`.
"""

from pathlib import Path


class ZeroLayerError(Exception):
    """Base of all errors that are raised on purpose."""


class ConfigError(ZeroLayerError):
    """A setting has a value that cannot be used.

    The message is one line: which field, which value, what to write instead.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field} = {value!r}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix


class ArenaError(ZeroLayerError):
    """An arena file or the runtime directory cannot be used; nothing was changed."""


class ArenaSpaceError(ArenaError):
    """The file system that holds the arena has no room for it."""

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{path} needs {needed_bytes} bytes and {free_bytes} are free on {path.parent}: "
            "lower the snapshot budget, or enlarge the tmpfs "
            "(mount -o remount,size=... /dev/shm; with Docker: --shm-size)"
        )
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class RuntimeDirError(ArenaError):
    """The runtime directory is a symlink, belongs to someone else or is open to others."""


class TableError(ZeroLayerError):
    """A shared table is missing, damaged or of another version."""


class EngineError(ZeroLayerError):
    """An engine could not be started, or failed and was given up."""


class SimulationError(ZeroLayerError):
    """A simulated run was refused, or the process that did it ended."""
