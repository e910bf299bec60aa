import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zerolayer.arena.runtime_dir import RuntimeDir, list_instances, process_start_ticks, reclaim
from zerolayer.core.errors import RuntimeDirError

MAKE_AND_HANG = """
import sys
from pathlib import Path
from zerolayer.arena.runtime_dir import RuntimeDir
made = RuntimeDir.create(url="http://x", model="m", started_unix=1.0, shm=Path(sys.argv[1]))
made.arena_path(0, 1, 0).write_bytes(b"kv")
print(made.path, flush=True)
sys.stdin.read()
"""


def create(shm: Path, started: float = 1.0) -> RuntimeDir:
    return RuntimeDir.create(url="http://x", model="m", started_unix=started, shm=shm)


def test_an_instance_is_private_and_says_who_made_it(tmp_path: Path) -> None:
    made = create(tmp_path)
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.path.parent.stat().st_mode & 0o777 == 0o700
    assert (made.path / "instance.json").stat().st_mode & 0o777 == 0o600
    seen = RuntimeDir.open(made.path)
    assert seen.info.pid == os.getpid()
    assert seen.info.pid_start_ticks == process_start_ticks(os.getpid())
    assert seen.alive
    assert len(made.instance) == 16
    made.remove()
    assert not made.path.exists()


def test_file_names_tell_engine_incarnation_and_rank(tmp_path: Path) -> None:
    made = create(tmp_path)
    assert made.arena_path(0, 1, 0).name == "arena-e0-1-r0.kv"
    assert made.board_path(3).name == "board-e3.tbl"
    assert made.table_path("load_heatmap").name == "load_heatmap.tbl"
    assert [path.name for path in made.files()] == ["instance.json"]
    made.remove()


def test_running_instances_are_listed_oldest_first_and_never_reclaimed(tmp_path: Path) -> None:
    assert list_instances(tmp_path) == []
    assert reclaim(tmp_path) == []
    younger, older = create(tmp_path, 2.0), create(tmp_path, 1.0)
    listed = [found.instance for found in list_instances(tmp_path)]
    assert listed == [older.instance, younger.instance]
    assert reclaim(tmp_path) == []
    younger.remove()
    older.remove()


def test_what_a_killed_process_left_is_reclaimed_and_only_that(tmp_path: Path) -> None:
    mine = create(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", MAKE_AND_HANG, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        assert reclaim(tmp_path) == []
        child.kill()
        child.wait()
    assert [found.instance for found in list_instances(tmp_path)] == [mine.instance]
    assert reclaim(tmp_path) == [theirs.name]
    assert not theirs.exists()
    assert mine.path.exists()
    mine.remove()


def test_a_pid_that_was_given_to_another_process_does_not_keep_leftovers(tmp_path: Path) -> None:
    made = create(tmp_path)
    text = (made.path / "instance.json").read_text()
    os.close(made._lock_fd)
    start = str(made.info.pid_start_ticks)
    (made.path / "instance.json").write_text(text.replace(start, str(int(start) - 1)))
    assert reclaim(tmp_path) == [made.instance]


def test_an_instance_that_never_got_its_file_is_reclaimed(tmp_path: Path) -> None:
    made = create(tmp_path)
    base = made.path.parent
    (base / ("0" * 16)).mkdir(mode=0o700)
    (base / "something else").mkdir()
    assert reclaim(tmp_path) == ["0" * 16]
    assert (base / "something else").exists()
    made.remove()


def test_a_symlink_as_runtime_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"zerolayer-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    for attempt in (create, reclaim, list_instances):
        with pytest.raises(RuntimeDirError, match="symlink"):
            attempt(tmp_path)


def test_a_runtime_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    base = tmp_path / f"zerolayer-{os.geteuid()}"
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(RuntimeDirError, match="open to others"):
        create(tmp_path)


def test_a_runtime_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / f"zerolayer-{os.geteuid() + 1}"
    base.mkdir(mode=0o700)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(RuntimeDirError, match="owned by uid"):
        create(tmp_path)


def test_a_missing_shared_memory_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(RuntimeDirError, match="cannot create"):
        create(tmp_path / "nowhere")


def test_the_last_instance_takes_the_directory_above_with_it(tmp_path: Path) -> None:
    first = RuntimeDir.create(url="u", model="m", started_unix=1.0, shm=tmp_path)
    second = RuntimeDir.create(url="u", model="m", started_unix=2.0, shm=tmp_path)
    first.remove()
    assert second.path.is_dir()
    second.remove()
    assert list(tmp_path.iterdir()) == []
    assert list_instances(tmp_path) == []
    assert reclaim(tmp_path) == []


def test_instances_that_come_and_go_at_once_do_not_take_each_others_directory(
    tmp_path: Path,
) -> None:
    def come_and_go(number: int) -> bool:
        made = RuntimeDir.create(url="u", model="m", started_unix=1.0, shm=tmp_path)
        there = made.alive and (made.path / "instance.json").exists()
        made.remove()
        return there

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(come_and_go, range(200)))
    assert list(tmp_path.iterdir()) == []
