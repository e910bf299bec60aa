"""Open readers of the fleet's arenas, one per file: opening maps the whole file."""

from pathlib import Path

from zerolayer.arena.reader import ArenaReader
from zerolayer.stitch.driver import Owned


class ArenaReaders:
    """Kept for as long as the file is: `close` before it is unlinked."""

    def __init__(self) -> None:
        self._readers: dict[str, ArenaReader] = {}

    def get(self, path: str) -> ArenaReader | None:
        """The reader of an arena file; None where there is none (yet)."""
        reader = self._readers.get(path)
        if reader is None:
            reader = ArenaReader.open_or_none(Path(path))
            if reader is not None:
                self._readers[path] = reader
        return reader

    def close(self, path: str) -> None:
        """Forget a file."""
        reader = self._readers.pop(path, None)
        if reader is not None:
            reader.close()

    def committed_tokens(self, owned: Owned) -> int | None:
        """Tokens of a stream whose KV its engine has saved; None where the engine saves none."""
        reader = self.get(owned.sources[0]) if owned.sources and not owned.by_prefill else None
        if reader is None:
            return None
        slot = reader.find(owned.stream.stream_id)
        return slot.watermark if slot is not None else 0
