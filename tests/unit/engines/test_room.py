from pathlib import Path

from zerolayer.engines.room import GIB, Room, ram_free


def test_what_does_not_fit_is_named_with_its_figures() -> None:
    room = Room(ram_free=int(5 * GIB), ram_each=int(2 * GIB), shm_free=int(GIB), shm_each=int(GIB))
    assert room.lacks(1) == []
    assert room.lacks(2) == ["2 more engines need 2.0 GiB of /dev/shm and 1.0 GiB are free"]
    assert len(room.lacks(3)) == 2


def test_a_container_has_no_more_than_its_own_limit(tmp_path: Path) -> None:
    machine = ram_free(tmp_path)
    assert machine > 0
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(ram_free(tmp_path) - machine) < machine
    (tmp_path / "memory.max").write_text("4000\n")
    assert ram_free(tmp_path) == 4000 - 3000 + 500
