"""What is made of the kernel's run-queue times, on a /proc of our own."""

from pathlib import Path

import pytest

from zerolayer.engines.core_waits import CHOOSE_EVERY_NS, THREADS_MAX, CoreWaits

MS = 1_000_000
PID = 7


class FakeProc:
    """Threads of one process."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def thread(self, tid: int, ran_ms: int, waited_ms: int, slices: int, state: str = "S") -> None:
        folder = self.root / str(PID) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{ran_ms * MS} {waited_ms * MS} {slices}\n")
        (folder / "stat").write_text(f"{tid} (a (b) {tid}) {state} 1 2 3\n")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_a_wait_that_has_ended_is_counted(proc: FakeProc) -> None:
    proc.thread(1, 100, 50, 10)
    waits = CoreWaits([PID], proc.root)
    assert waits.look(0) == 0
    proc.thread(1, 105, 60, 12)
    assert waits.look(15 * MS) == 10 * MS
    assert waits.look(30 * MS) == 10 * MS, "it sleeps"


def test_a_wait_that_goes_on_counts_at_once_and_only_once(proc: FakeProc) -> None:
    proc.thread(1, 100, 50, 10)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    proc.thread(1, 100, 50, 10, "R")
    assert [waits.look(at * MS) for at in (15, 30, 45)] == [15 * MS, 30 * MS, 45 * MS]
    proc.thread(1, 101, 99, 11, "R")  # it waited 49 ms and ran
    assert waits.look(60 * MS) == 49 * MS


@pytest.mark.parametrize("state", ["S", "T", "D"])
def test_a_thread_that_does_not_want_a_core_waits_for_none(proc: FakeProc, state: str) -> None:
    proc.thread(1, 100, 50, 10)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    proc.thread(1, 100, 50, 10, state)
    assert waits.look(1_000 * MS) == 0


@pytest.mark.parametrize(("ran_ms", "waited_ms"), [(4, 10), (6, 9), (12, 7)])
def test_waits_of_two_threads_add_up_as_far_as_none_ran_and_the_longest_counts_in_full(
    proc: FakeProc, ran_ms: int, waited_ms: int
) -> None:
    proc.thread(1, 100, 0, 1)
    proc.thread(2, 90, 0, 1)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    proc.thread(1, 100 + ran_ms, 3, 2)
    proc.thread(2, 92, 7, 2)
    assert waits.look(15 * MS) == waited_ms * MS


def test_a_thread_that_gets_no_core_while_another_spins_for_it_counts(proc: FakeProc) -> None:
    proc.thread(1, 100, 0, 1)
    proc.thread(2, 100, 0, 1)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    for tick in range(1, 11):
        proc.thread(1, 100, 0, 1, "R")
        proc.thread(2, 100 + 15 * tick, 0, 1, "R")
        assert waits.look(15 * tick * MS) == 15 * tick * MS


def test_threads_that_compute_nothing_do_not_count(proc: FakeProc) -> None:
    proc.thread(1, 1_000, 0, 1)
    proc.thread(2, 10, 0, 1)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    proc.thread(2, 10, 900, 5)
    assert waits.look(1_000 * MS) == 0


def test_the_first_thread_counts_though_it_runs_little(proc: FakeProc) -> None:
    proc.thread(PID, 1, 0, 1)
    proc.thread(8, 1_000, 0, 1)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    proc.thread(PID, 2, 900, 5)
    assert waits.look(1_000 * MS) == 900 * MS


def test_who_computes_is_looked_up_again_and_again(proc: FakeProc) -> None:
    proc.thread(1, 1_000, 0, 1)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    proc.thread(2, 500, 0, 1)
    before = waits.look(CHOOSE_EVERY_NS)
    proc.thread(2, 510, 5, 2)
    assert waits.look(CHOOSE_EVERY_NS + 15 * MS) - before == 5 * MS


def test_the_number_of_descriptors_is_bounded_and_they_are_given_back(proc: FakeProc) -> None:
    proc.thread(PID, 1, 0, 1)
    for tid in range(PID + 1, PID + 3 * THREADS_MAX):
        proc.thread(tid, 100, 0, 1)
    waits = CoreWaits([PID], proc.root)
    waits.look(0)
    assert len(waits._threads) == THREADS_MAX + 1  # and the first one
    waits.close()
    assert not waits._threads


def test_a_process_that_is_gone_or_a_kernel_that_does_not_tell_waits_for_nothing(
    proc: FakeProc,
) -> None:
    waits = CoreWaits([PID], proc.root)
    assert waits.look(0) == waits.look(CHOOSE_EVERY_NS) == 0
    proc.thread(1, 100, 50, 10)
    (proc.root / str(PID) / "task" / "1" / "schedstat").write_text("")
    assert waits.look(2 * CHOOSE_EVERY_NS) == 0
