import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerolayer.arena import tables
from zerolayer.arena.board import ChaosOrder, CoreState, EngineBoard, WorkerState
from zerolayer.arena.tables import (
    KvSnapshotMeta,
    LoadHeatmap,
    LoadRow,
    SnapshotRow,
    StallDetectCfg,
    StallSettings,
    dump,
)
from zerolayer.core.errors import ConfigError, TableError


def snapshot(stream: str, updated: float = 1.0) -> SnapshotRow:
    return SnapshotRow(stream, "e0", "arena-e0-1-r0.kv", "", updated, 4096, 17)


def test_a_heat_map_row_is_read_back_and_a_cleared_one_is_gone(tmp_path: Path) -> None:
    table = LoadHeatmap.create(tmp_path / "t")
    row = LoadRow(
        "e7", 0.25, 12, 61.5, 1700000000.5, (1.0, 2.0, 3.0, 4.0, 125.0), (5.0, 4.0, 3.0, 2.0, 1.0)
    )
    table.write(7, row)
    table.write(0, LoadRow("e0", 0.0, 0, 0.0, 1.0))
    reader = LoadHeatmap.open_reader(tmp_path / "t")
    assert reader.rows()[1] == row
    table.clear(0)
    assert reader.rows() == [row]


def test_the_snapshot_table_forgets_the_stream_that_was_not_touched_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "SNAPSHOT_ROWS", 3)
    table = KvSnapshotMeta.create(tmp_path / "t")
    for at, stream in enumerate(["a", "b", "c", "a", "d"]):
        table.write(snapshot(stream, float(at)))
    assert [row.stream for row in table.rows()] == ["d", "a", "c"]
    table.remove("a")
    table.remove("unknown")
    table.write(snapshot("e", 9.0))
    assert [row.stream for row in table.rows()] == ["e", "d", "c"]


def test_a_long_stream_id_is_cut_at_a_character(tmp_path: Path) -> None:
    table = KvSnapshotMeta.create(tmp_path / "t")
    table.write(snapshot("ä" * 40))
    assert table.rows()[0].stream == "ä" * 32
    table.write(snapshot("x" + "ä" * 40, 0.5))
    assert table.rows()[1].stream == "x" + "ä" * 31


def test_stall_settings_change_field_by_field_while_others_read(tmp_path: Path) -> None:
    StallDetectCfg.create(tmp_path / "t").write(StallSettings())
    reader = StallDetectCfg.open_reader(tmp_path / "t")
    assert reader.read() == StallSettings()
    operator = StallDetectCfg.open_writer(tmp_path / "t")
    assert operator.update({"threshold_ms": 120.0}).threshold_ms == 120.0
    assert reader.read() == StallSettings(threshold_ms=120.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold_ms", 0),
        ("threshold_ms", float("nan")),
        ("threshold_ms", "80"),
        ("consecutive_failures", 2.5),
        ("consecutive_failures", True),
        ("moves_per_minute_max", -1),
        ("restart_after_s", float("inf")),
        ("no_such_field", 1),
    ],
)
def test_a_wrong_stall_setting_names_field_value_and_fix_and_changes_nothing(
    tmp_path: Path, field: str, value: Any
) -> None:
    table = StallDetectCfg.create(tmp_path / "t")
    table.write(StallSettings())
    with pytest.raises(ConfigError) as refused:
        table.update({field: value})
    assert refused.value.field == field
    assert refused.value.fix
    assert table.read() == StallSettings()


def test_stall_settings_that_no_operator_could_have_written_read_as_nothing(
    tmp_path: Path,
) -> None:
    table = StallDetectCfg.create(tmp_path / "t")
    assert table.read() is None
    table.write(StallSettings())
    table._file.raw[72:80] = b"\xff" * 8
    assert table.read() is None


def test_a_board_keeps_its_three_parts_apart(tmp_path: Path) -> None:
    board = EngineBoard.create(tmp_path / "b")
    assert board.read_core() is None
    assert board.read_chaos() == ChaosOrder()
    assert board.worker_pids() == ()
    state = CoreState(*range(1, 15))
    core = EngineBoard.open_writer(tmp_path / "b")
    core.write_core(state)
    core.write_worker(0, WorkerState(41, 1 << 40, 7, 10**10))
    core.write_worker(1, WorkerState(42))
    EngineBoard.open_writer(tmp_path / "b").order_chaos(ChaosOrder(2, 20.0))
    assert board.read_core() == state
    assert board.worker_pids() == (41, 42)
    assert board.read_worker(0) == WorkerState(41, 1 << 40, 7, 10**10)
    assert board.read_worker(2) is None
    assert core.read_chaos() == ChaosOrder(2, 20.0)
    with pytest.raises(ConfigError, match="chaos_mode"):
        board.order_chaos(ChaosOrder(7))
    with pytest.raises(ConfigError, match="chaos_factor"):
        board.order_chaos(ChaosOrder(2, 0.0))


def test_a_record_whose_writer_died_half_way_reads_as_nothing_until_the_next_write(
    tmp_path: Path,
) -> None:
    board = EngineBoard.create(tmp_path / "b")
    board.write_core(CoreState(step_seq=1))
    board._file.longs[8] |= 1
    assert board.read_core() is None
    EngineBoard.open_writer(tmp_path / "b").write_core(CoreState(step_seq=2))
    assert board.read_core() == CoreState(step_seq=2)


def test_a_reader_beside_a_writer_never_sees_half_a_record(tmp_path: Path) -> None:
    board = EngineBoard.create(tmp_path / "b")
    reader = EngineBoard.open_reader(tmp_path / "b")
    stop = threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            board.write_core(CoreState(*[value] * 14))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(3000):
            state = reader.read_core()
            assert state is None or len(set(msgspec.structs.astuple(state))) == 1
    finally:
        stop.set()
        thread.join()


def test_every_table_dumps_to_plain_rows_that_json_can_hold(tmp_path: Path) -> None:
    LoadHeatmap.create(tmp_path / "load_heatmap").write(0, LoadRow("e0", 0.5, 1, 2.0, 3.0))
    KvSnapshotMeta.create(tmp_path / "kv_snapshot_meta").write(snapshot("s"))
    StallDetectCfg.create(tmp_path / "stall_detect_cfg").write(StallSettings())
    EngineBoard.create(tmp_path / "engine_board").write_core(CoreState(core_pid=5))
    for name in (*tables.DUMPABLE, "engine_board"):
        (row,) = dump(name, tmp_path / name)
        assert msgspec.json.decode(msgspec.json.encode(row)) == row
    assert dump("kv_snapshot_meta", tmp_path / "kv_snapshot_meta")[0]["stream"] == "s"


def test_a_foreign_missing_or_damaged_table_is_refused(tmp_path: Path) -> None:
    LoadHeatmap.create(tmp_path / "t")
    for attempt in (KvSnapshotMeta.open_reader, EngineBoard.open_writer):
        with pytest.raises(TableError, match="not a"):
            attempt(tmp_path / "t")
    with pytest.raises(TableError, match="cannot create"):
        LoadHeatmap.create(tmp_path / "t")
    with pytest.raises(TableError, match="cannot open"):
        LoadHeatmap.open_reader(tmp_path / "missing")
    with pytest.raises(TableError, match="no table"):
        dump("nothing", tmp_path / "t")
