"""Laws of which GPUs an engine gets."""

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from zerolayer.core.errors import ConfigError, EngineError
from zerolayer.engines.gpus import (
    MEMORY_SHARE,
    NO_GPUS,
    Gpus,
    divide_memory,
    find_gpus,
    require_memory,
    take_device_ids,
)
from zerolayer.engines.launcher import Launcher, LaunchOrder


@dataclass
class FakePlatform:
    """A machine with so many GPUs that CUDA sees."""

    count: int = 8
    device_type: str = "cuda"

    def device_count(self) -> int:
        return self.count


CPU = FakePlatform(0, "cpu")


def config(ranks: int = 1, backend: str | None = None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=ranks, distributed_executor_backend=backend)
    )


def eight(ranks: int = 1, per_gpu: int = 1) -> Gpus:
    return find_gpus(config(ranks), "", None, per_gpu, FakePlatform())


@given(gpus=st.integers(1, 16), ranks=st.integers(1, 4), per_gpu=st.integers(1, 3))
def test_every_engine_has_its_ranks_of_gpus_and_no_gpu_has_more_engines_than_may_share_it(
    gpus: int, ranks: int, per_gpu: int
) -> None:
    found = find_gpus(config(ranks), "", None, per_gpu, FakePlatform(gpus))
    users: dict[str, set[int]] = {}
    for slot in range(found.engines_max):
        mine = found.of(slot)
        assert len(set(mine)) == ranks
        for word in mine:
            users.setdefault(word, set()).add(slot)
    assert found.engines_max == gpus // ranks * per_gpu
    assert all(len(slots) <= per_gpu for slots in users.values())
    assert set(users) <= set(map(str, range(gpus)))


@given(gpus=st.integers(1, 16), ranks=st.integers(1, 4), per_gpu=st.integers(1, 3))
def test_engines_share_all_their_gpus_or_none(gpus: int, ranks: int, per_gpu: int) -> None:
    found = find_gpus(config(ranks), "", None, per_gpu, FakePlatform(gpus))
    slots = range(found.engines_max)
    for one in slots:
        for other in slots:
            both = set(found.of(one)) & set(found.of(other))
            assert both in (set(), set(found.of(one)))


def test_slots_have_neighbouring_gpus_in_their_order() -> None:
    assert [eight(2).of(slot) for slot in range(4)] == [
        ("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"),
    ]  # fmt: skip


def test_no_gpu_is_shared_before_every_gpu_has_an_engine() -> None:
    found = find_gpus(config(), "4,5", None, 2, FakePlatform(2))
    assert [found.of(slot) for slot in range(4)] == [("4",), ("5",), ("4",), ("5",)]


@pytest.mark.parametrize(
    ("chosen", "ids", "count", "visible"),
    [
        ("", None, 2, ("0", "1")),
        ("3,1", None, 2, ("3", "1")),
        (" 2, 3 ", None, 2, ("2", "3")),
        ("0,1,9,2", None, 2, ("0", "1")),
        ("GPU-8932f937-d72c,GPU-1c5c", None, 2, ("GPU-8932f937-d72c", "GPU-1c5c")),
        ("MIG-4fa7c1d2,MIG-9d1c22aa", None, 1, ("MIG-4fa7c1d2", "MIG-9d1c22aa")),
        ("MIG-GPU-8932f937/1/0,MIG-GPU-8932f937/2/0", [1], 1, ("MIG-GPU-8932f937/2/0",)),
        ("", [6, 2], 8, ("6", "2")),
        ("4,5,6,7", [3, 0], 4, ("7", "4")),
        ("", ["GPU-1c5c", "GPU-8932"], 8, ("GPU-1c5c", "GPU-8932")),
        ("-1", None, 0, ()),
    ],
)
def test_the_gpus_are_those_that_the_user_left_visible_in_his_order(
    chosen: str, ids: list[int | str] | None, count: int, visible: tuple[str, ...]
) -> None:
    assert find_gpus(config(), chosen, ids, 1, FakePlatform(count)).visible == visible


@pytest.mark.parametrize(
    ("ids", "said"),
    [([0, 0], "once"), ([0, "GPU-1c5c"], "all by number"), ([0, 2], "has 2 visible GPUs")],
)
def test_device_ids_that_name_no_set_of_visible_gpus_are_refused(
    ids: list[int | str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        find_gpus(config(), "5,7", ids, 1, FakePlatform(2))
    assert refused.value.field == "--device-ids"


def test_a_process_sees_its_own_gpus_and_no_others() -> None:
    found = find_gpus(config(2), "GPU-a,GPU-b,GPU-c,GPU-d", None, 1, FakePlatform(4))
    assert found.environment(1) == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}


@pytest.mark.parametrize(
    ("found", "engines", "said"),
    [
        (eight(), 9, "9: this machine has 8 visible GPUs and each engine takes 1: give at most 8, "
         "or start with --engines-per-gpu 2"),
        (eight(2, 2), 9, "9: this machine has 8 visible GPUs and each engine takes 2: give at most "
         "8, or start with --engines-per-gpu 3"),
        (find_gpus(config(), "", None, 1, FakePlatform(1)), 2,
         "2: this machine has 1 visible GPU and each engine takes 1: give at most 1, "
         "or start with --engines-per-gpu 2"),
        (find_gpus(config(2), "", None, 1, FakePlatform(1)), 1,
         "1: this machine has 1 visible GPU and each engine takes 2"),
        (find_gpus(config(), "-1", None, 1, FakePlatform(0)), 1,
         "1: this machine has 0 visible GPUs and each engine takes 1"),
    ],
)  # fmt: skip
def test_engines_beyond_the_gpus_are_refused_and_what_would_do_is_said(
    found: Gpus, engines: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        found.require("--engines", engines)
    assert str(refused.value) == f"--engines = {said}"


def test_as_many_engines_as_the_gpus_allow_are_not_refused() -> None:
    eight().require("--engines", 8)
    eight(2, 3).require("N", 12)


@pytest.mark.parametrize(
    "found",
    [
        find_gpus(config(2), "0,1", [0], 1, CPU),
        find_gpus(config(4, "ray"), "", None, 1, FakePlatform()),
    ],
)
def test_without_gpus_or_where_ray_chooses_nothing_is_assigned_and_nothing_refused(
    found: Gpus,
) -> None:
    assert found == NO_GPUS
    found.require("--engines", 256)
    found.require_same_size(config(8))
    assert (found.of(255), found.environment(255)) == ((), {})


def test_an_engine_that_takes_another_number_of_gpus_is_refused() -> None:
    eight(2).require_same_size(config(2))
    with pytest.raises(ConfigError, match="= 4: in a roll each engine keeps its 2 GPUs"):
        eight(2).require_same_size(config(4))


# -- memory ---------------------------------------------------------------------------------------


def memory(words: list[str], per_gpu: int, platform: FakePlatform) -> float:
    """What each engine takes of a GPU, after vLLM's words have been read."""
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("cache")
    group.add_argument("--gpu-memory-utilization", dest=MEMORY_SHARE, type=float, default=0.9)
    divide_memory(parser, per_gpu, platform)
    args = parser.parse_args(words)
    require_memory(args, per_gpu, platform)
    share: float = getattr(args, MEMORY_SHARE)
    return share


@given(st.integers(1, 64))
def test_engines_that_share_a_gpu_take_together_what_one_alone_would(per_gpu: int) -> None:
    assert memory([], per_gpu, FakePlatform()) * per_gpu == pytest.approx(0.9)


def test_what_the_user_gives_is_each_engines_own_and_the_sum_is_at_most_the_whole() -> None:
    own = ["--gpu-memory-utilization", "0.5"]
    assert memory(own, 2, FakePlatform()) == 0.5
    with pytest.raises(ConfigError, match=r"= 0\.5: 3 engines share a GPU .* at most 0\.33"):
        memory(own, 3, FakePlatform())


def test_memory_on_a_cpu_is_not_divided() -> None:
    assert memory([], 4, CPU) == 0.9
    assert memory(["--gpu-memory-utilization", "0.5"], 4, CPU) == 0.5


def test_device_ids_are_kept_from_vllm_where_they_are_seen_to() -> None:
    words = SimpleNamespace(device_ids=[1])
    take_device_ids(words, CPU)
    assert words.device_ids == [1]
    take_device_ids(words, FakePlatform())
    assert words.device_ids is None


# -- starts ---------------------------------------------------------------------------------------


class NotingLauncher(Launcher):
    """Starts nothing, and knows how many starts there were at once on the same GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[tuple[str, ...], int] = {}
        self.most: dict[tuple[str, ...], int] = {}
        self.fails = False

    async def _start(self, order: LaunchOrder) -> Any:
        gpus = order.gpus
        self.now[gpus] = self.now.get(gpus, 0) + 1
        self.most[gpus] = max(self.most.get(gpus, 0), self.now[gpus])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.now[gpus] -= 1
        if self.fails:
            raise EngineError("no such memory")


def order(gpus: tuple[str, ...]) -> LaunchOrder:
    return LaunchOrder("e0", 1, None, Path("/dev/null"), {}, Path("/dev/null"), gpus)


async def test_engines_of_one_gpu_start_one_after_the_other_and_all_others_at_once() -> None:
    launcher = NotingLauncher()
    await asyncio.gather(*(launcher.start(order(gpus)) for gpus in [("0",), ("1",), ()] * 3))
    assert launcher.most == {("0",): 1, ("1",): 1, (): 3}
    launcher._zmq.term()


async def test_a_start_that_fails_or_is_given_up_lets_the_next_one_begin() -> None:
    launcher = NotingLauncher()
    launcher.fails = True
    given_up = asyncio.ensure_future(launcher.start(order(("0",))))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(EngineError, match="no such memory"):
        await launcher.start(order(("0",)))
    launcher.fails = False
    await asyncio.wait_for(launcher.start(order(("0",))), 10.0)
    launcher._zmq.term()
