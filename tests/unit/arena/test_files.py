import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from tests.unit.arena.fake_kv import carry_out, hashes_of, small_geometry, tokens_of
from zerolayer.arena import layout
from zerolayer.arena.layout import ArenaGeometry
from zerolayer.arena.ledger import ArenaLedger
from zerolayer.arena.mapping import ArenaFile
from zerolayer.arena.reader import ArenaReader
from zerolayer.arena.writer import ArenaWriter
from zerolayer.core.errors import ArenaError, ArenaSpaceError, ConfigError

FINGERPRINT = bytes(range(32))


def written_arena(path: Path) -> ArenaFile:
    file = ArenaFile.create(path, small_geometry(), FINGERPRINT)
    ledger, writer = ArenaLedger(file.geometry, 8), ArenaWriter(file)
    for variant in (0, 1):
        ledger.open(f"s{variant}", 0)
        ledger.begin_step()
        tokens = tokens_of(variant)
        plan = ledger.advance(f"s{variant}", 14, hashes_of(tokens, 14), tokens)
        assert plan is not None
        carry_out(writer, plan, tokens)
    return file


def test_regions_do_not_overlap_and_pages_are_aligned() -> None:
    g = ArenaGeometry(737_280, 7, 5, 100, 32)
    assert g.slots_offset == layout.HEADER_BYTES
    assert g.slot_offset(5) == g.page_headers_offset
    assert g.page_header_offset(7) <= g.pages_offset
    assert g.pages_offset % 4096 == 0
    assert g.page_offset(7) == g.file_bytes
    assert g.slot_bytes >= layout.SLOT_LISTS + 8 * 100
    assert g.page_header_bytes >= layout.PAGE_TOKENS + 4 * 32


@given(budget=st.integers(1, 1 << 32), page=st.integers(1, 1 << 20))
def test_a_budget_is_used_up_but_never_passed(budget: int, page: int) -> None:
    def make() -> ArenaGeometry:
        return ArenaGeometry.for_budget(
            budget, page, slot_count=8, pages_per_stream_max=64, block_tokens=32
        )

    one_page = ArenaGeometry(page, 1, 8, 64, 32).file_bytes
    assume(not one_page <= budget < one_page + 4096)
    if budget < one_page:
        with pytest.raises(ConfigError, match="give at least"):
            make()
        return
    g = make()
    assert g.file_bytes <= budget
    assert budget - g.file_bytes < 2 * (g.page_stride + g.page_header_bytes) + 8192


def test_an_impossible_geometry_is_refused_by_field() -> None:
    with pytest.raises(ConfigError, match="page_count = 0"):
        ArenaGeometry(4096, 0, 1, 1, 32)


def test_a_new_file_is_private_and_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    ArenaFile.create(path, small_geometry(), FINGERPRINT).close()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ArenaError, match="cannot create"):
        ArenaFile.create(path, small_geometry(), FINGERPRINT)


def test_a_symlink_in_the_way_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    written_arena(target).close()
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(ArenaError):
        ArenaReader(link)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    with pytest.raises(ArenaError):
        ArenaFile.create(dangling, small_geometry(), FINGERPRINT)
    assert not (tmp_path / "nothing").exists()


def test_a_file_open_to_others_or_no_file_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    written_arena(path).close()
    path.chmod(0o644)
    with pytest.raises(ArenaError, match="open to others"):
        ArenaReader(path)
    with pytest.raises(ArenaError, match="cannot open"):
        ArenaReader(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ArenaError, match="not a regular file"):
        ArenaReader(tmp_path / "pipe")


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.kv"
    written_arena(path).close()
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ArenaError, match=f"owned by uid {owner}"):
        ArenaReader(path)


def test_another_fingerprint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    written_arena(path).close()
    assert ArenaReader.open_or_none(path, bytes(32)) is None
    assert ArenaReader.open_or_none(path, FINGERPRINT) is not None


@pytest.mark.parametrize("keep", [0, 10, 4095, 4096, 9000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.kv"
    written_arena(path).close()
    os.truncate(path, keep)
    with pytest.raises(ArenaError):
        ArenaReader(path)


def test_a_file_truncated_while_mapped_has_no_match(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    file = written_arena(path)
    reader = ArenaReader(path)
    slot = reader.find("s0")
    assert slot is not None
    os.truncate(path, 0)
    assert reader.find("s0") is None
    assert reader.verified_tokens(slot, tokens_of(0)) == 0
    assert not reader.unchanged(slot)
    os.truncate(path, file.geometry.file_bytes)


def test_a_file_that_is_not_ready_or_foreign_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    file = written_arena(path)
    file.words[layout.HEADER_READY // 4] = 0
    with pytest.raises(ArenaError, match="not ready"):
        ArenaReader(path)
    file.raw[0:8] = b"NOTARENA"
    with pytest.raises(ArenaError, match="not an arena file"):
        ArenaReader(path)


@given(at=st.integers(0, layout.HEADER_BYTES - 1), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_one_wrong_bit_in_a_header_is_refused_or_lies_in_padding(
    tmp_path: Path, at: int, bit: int
) -> None:
    path = tmp_path / "a.kv"
    path.unlink(missing_ok=True)
    file = written_arena(path)
    file.raw[at] ^= 1 << bit
    reader = ArenaReader.open_or_none(path)
    assert (reader is not None) == (at >= 104)
    if reader is not None:
        reader.close()
    file.close()


@given(
    damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=60)
)
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
def test_damage_behind_the_header_raises_nothing_and_reads_nothing_outside(
    tmp_path: Path, damage: list[tuple[float, int]]
) -> None:
    path = tmp_path / "a.kv"
    path.unlink(missing_ok=True)
    file = written_arena(path)
    g = file.geometry
    reader = ArenaReader(path)
    for where, value in damage:
        file.raw[g.slots_offset + int(where * (g.pages_offset - g.slots_offset))] = value
    # The slots of the two streams are also made as wrong as they can be.
    for slot in range(len(damage) % 3):
        file.words[(g.slot_offset(slot) + layout.SLOT_PAGE_COUNT) // 4] = 0xFFFF_FFFF
        file.longs[(g.slot_offset(slot) + layout.SLOT_WATERMARK) // 8] = 0xFFFF_FFFF_FFFF_FFFF
        file.words[(g.slot_offset(slot) + layout.SLOT_LISTS) // 4 + 2] = 0xFFFF_FFFF
    for stream in ("s0", "s1", "other"):
        view = reader.find(stream)
        if view is None:
            continue
        assert (view.pages < g.page_count).all()
        assert view.watermark <= len(view.pages) * g.block_tokens
        tokens = [*tokens_of(int(stream[1:])), *range(100)]
        assert 0 <= reader.verified_tokens(view, tokens) <= view.watermark
        reader.unchanged(view)
    reader.close()
    file.close()


def test_too_little_room_is_said_with_path_bytes_and_fix(tmp_path: Path) -> None:
    huge = ArenaGeometry(1 << 30, 1 << 20, 4, 6, 4)
    with pytest.raises(ArenaSpaceError, match="lower the snapshot budget") as refused:
        ArenaFile.create(tmp_path / "a.kv", huge, FINGERPRINT)
    assert str(huge.file_bytes) in str(refused.value)
    assert str(tmp_path / "a.kv") in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_room_that_goes_while_allocating_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = ArenaGeometry(1 << 30, 1 << 20, 4, 6, 4)
    plenty = os.statvfs_result((4096, 4096, 1 << 60, 1 << 60, 1 << 60, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: plenty)
    with pytest.raises(ArenaSpaceError):
        ArenaFile.create(tmp_path / "a.kv", huge, FINGERPRINT)
    assert list(tmp_path.iterdir()) == []


def test_prefault_changes_nothing_and_works_without_the_new_madvise(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    file = written_arena(path)
    before = bytes(file.raw)
    file.prefault()
    reader = ArenaReader(path)
    reader.file.prefault()
    assert bytes(file.raw) == before


def test_a_page_read_into_pieces_is_the_page_that_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = written_arena(path)
    reader = ArenaReader(path, FINGERPRINT)
    half = file.geometry.page_bytes // 2
    pieces = [np.empty(half, np.uint8), np.empty(file.geometry.page_bytes - half, np.uint8)]
    assert reader.read_page(1, pieces)
    assert np.array_equal(np.concatenate(pieces), reader.page_view(1))


def test_a_page_of_a_file_that_was_cut_short_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = written_arena(path)
    reader = ArenaReader(path, FINGERPRINT)
    os.truncate(path, file.geometry.page_offset(1) + 5)
    assert not reader.read_page(1, [np.empty(file.geometry.page_bytes, np.uint8)])
