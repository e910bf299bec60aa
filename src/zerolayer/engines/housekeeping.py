"""Once a second: fills the public tables and lets go of arenas that no stream needs any more."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from zerolayer.arena.tables import KvSnapshotMeta, LoadHeatmap, SnapshotRow
from zerolayer.core.ids import engine_name
from zerolayer.engines.status_placement import load_rows

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

EVERY_S = 1.0


class Housekeeping:
    """Writes `load_heatmap` and `kv_snapshot_meta`; unlinks arenas of engines that are gone."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._heatmap = LoadHeatmap.create(fleet.runtime.table_path("load_heatmap"))
        self._snapshots = KvSnapshotMeta.create(fleet.runtime.table_path("kv_snapshot_meta"))
        self._readers = fleet.arenas
        self._rows = 0

    async def run(self) -> None:
        """Work for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            self._write_heatmap()
            self._write_snapshots()
            self._release_arenas()

    def _write_heatmap(self) -> None:
        fleet = self._fleet.driver.fleet
        for slot in range(fleet.engines, self._rows):
            self._heatmap.clear(slot)
        self._rows = fleet.engines
        for slot, row in enumerate(load_rows(self._fleet, time.time())):
            self._heatmap.write(slot, row)

    def _write_snapshots(self) -> None:
        """One row per live stream: where its snapshot is, how large, how far."""
        for stream_id, owned in self._fleet.driver.owned.items():
            engine = owned.stream.engine
            reader = self._readers.get(owned.sources[0]) if owned.sources else None
            slot = reader.find(stream_id) if reader is not None else None
            if engine is None or slot is None:
                continue
            self._snapshots.write(
                SnapshotRow(
                    stream=stream_id,
                    source=engine_name(engine),
                    destination_1=Path(owned.sources[0]).name,
                    destination_2="",
                    updated=time.time(),
                    bytes_written=slot.bytes_written,
                    committed_tokens=slot.watermark,
                )
            )

    def _release_arenas(self) -> None:
        """Unlink arenas of past incarnations once no stream may need them."""
        live = {port.arena for port in self._fleet.driver.ports if port is not None}
        needed = set(live)
        for stream_id, owned in self._fleet.driver.owned.items():
            self._forget_overtaken_sources(stream_id, owned.sources)
            needed.update(owned.sources)
        for path in self._fleet.runtime.files():
            rank0 = self._rank0(path)
            if rank0 is None or rank0 in needed or self._starting(rank0):
                continue
            self._readers.close(rank0)
            path.unlink(missing_ok=True)

    def _forget_overtaken_sources(self, stream_id: str, sources: list[str]) -> None:
        """Drop older arenas of a stream once its newest one holds at least as much."""
        if len(sources) < 2:
            return
        newest = self._readers.get(sources[0])
        slot = newest.find(stream_id) if newest is not None else None
        if slot is None:
            return
        older = [self._readers.get(path) for path in sources[1:]]
        found = [reader.find(stream_id) for reader in older if reader is not None]
        if all(view is None or view.watermark <= slot.watermark for view in found):
            del sources[1:]

    def _starting(self, rank0: str) -> bool:
        """Whether this is the arena of an engine that is only coming up."""
        for slot, life in enumerate(self._fleet.driver.lives):
            if rank0 == str(self._fleet.runtime.arena_path(slot, life.incarnation, 0)):
                return life.state.has_process
        return False

    @staticmethod
    def _rank0(path: Path) -> str | None:
        """The rank 0 arena that this file belongs to, or None when it is no arena."""
        if not (path.name.startswith("arena-") and path.suffix == ".kv"):
            return None
        stem, _, _ = path.name.rpartition("-r")
        return str(path.with_name(f"{stem}-r0.kv"))
