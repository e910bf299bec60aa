import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.unit.engines.fake_nvml import (
    GIB,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NOT_SUPPORTED,
    Card,
    FakeError,
    FakeNvml,
)
from zerolayer.engines import nvml as nvml_module
from zerolayer.engines.nvml import (
    NAMES,
    NOTHING,
    EngineGpus,
    NvmlReader,
    Reading,
    is_own_process,
    load_nvml,
)

SECOND_NS = 10**9
NOW_US = 1_800_000_000 * 10**6
OURS = frozenset({100, 101})
NEIGHBOUR = 900


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was logged, one line each; vLLM's loggers do not hand on to the root."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    keep = Keep()
    nvml_module.logger.addHandler(keep)
    yield said
    nvml_module.logger.removeHandler(keep)


def reader(nvml: FakeNvml) -> NvmlReader:
    return NvmlReader(nvml, lambda pid: pid in OURS)


def look(each: NvmlReader, *engines: str, incarnation: int = 1, at_s: float = 1.0) -> Any:
    """One look; `engines`: the words of each slot's GPUs, with commas between them."""
    gpus = {
        slot: EngineGpus(incarnation, tuple(words.split(","))) for slot, words in enumerate(engines)
    }
    return each.read(gpus, int(at_s * SECOND_NS), NOW_US)


def shared(neighbour_sm: int = 0, **more: Any) -> Card:
    """A card with both of our engines and somebody else's program on it."""
    sm = [(100, NOW_US, 60), (101, NOW_US, 30)]
    if neighbour_sm:
        sm.append((NEIGHBOUR, NOW_US, neighbour_sm))
    memory: dict[int, int | None] = {100: 10 * GIB, 101: 10 * GIB, NEIGHBOUR: 3 * GIB}
    return Card(busy=97, memory=memory, sm=sm, **more)


def test_without_the_library_there_are_no_counters_and_one_line_says_so(lines: list[str]) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'vllm.third_party.pynvml'")

    assert load_nvml(missing) is None
    assert lines == ["GPU counters are not read: No module named 'vllm.third_party.pynvml'"]


def test_without_a_driver_there_are_no_counters_and_one_line_says_so(lines: list[str]) -> None:
    nvml = FakeNvml()

    def no_driver() -> None:
        raise FakeError(LIBRARY_NOT_FOUND)

    nvml.init = no_driver
    assert load_nvml(lambda: nvml) is None
    assert lines == ["GPU counters are not read: nvmlInit failed (NVML Shared Library Not Found)"]


def test_the_fake_has_every_name_that_is_used() -> None:
    assert [name for name in NAMES if not hasattr(FakeNvml(), name)] == []


def test_busy_is_the_share_of_time_with_a_kernel_and_belongs_to_no_capacity() -> None:
    reading = look(reader(FakeNvml(_0=Card(busy=97, memory={100: GIB}))), "0")[0]
    assert reading == Reading(busy=0.97, foreign=0.0, foreign_bytes=0, pcie=0.0)
    assert reading.report().gpu_busy == 0.97
    assert reading.report().foreign_util == 0.0


def test_engines_of_one_fleet_on_one_card_are_not_foreign_to_each_other() -> None:
    nvml = FakeNvml(_0=shared())
    first, second = look(reader(nvml), "0", "0").values()
    assert first == second
    assert first.foreign == 0.0
    assert nvml.calls["UtilizationRates"] == 1, "a card is read once, not once per engine"


def test_what_a_foreign_program_uses_is_taken_from_each_engine_there() -> None:
    nvml = FakeNvml(_0=shared(20), _1=Card(memory={101: GIB}))
    beside, alone = look(reader(nvml), "0", "1").values()
    assert beside.foreign == pytest.approx(0.2)
    assert beside.foreign_bytes == 3 * GIB
    assert (alone.foreign, alone.foreign_bytes) == (0.0, 0)


@pytest.mark.parametrize(("neighbours", "most"), [(1, 1 / 2), (2, 2 / 3), (3, 3 / 4)])
def test_programs_that_always_want_the_gpu_leave_an_engine_its_slice(
    neighbours: int, most: float
) -> None:
    """One that decodes a single stream is at 100 % while it is alone."""
    pids = range(NEIGHBOUR, NEIGHBOUR + neighbours)
    card = Card(
        memory={100: GIB, **dict.fromkeys(pids, GIB)}, sm=[(pid, NOW_US, 100) for pid in pids]
    )
    assert look(reader(FakeNvml(_0=card)), "0")[0].foreign == pytest.approx(most)


def test_old_samples_and_cells_that_the_driver_left_unfilled_do_not_count() -> None:
    card = shared()
    card.sm += [(NEIGHBOUR, NOW_US - 60_000_000, 80), (NEIGHBOUR, NOW_US, 4_000_000)]
    assert look(reader(FakeNvml(_0=card)), "0")[0].foreign == 0.0


def test_the_newest_sample_of_a_program_counts() -> None:
    card = shared(30)
    card.sm.append((NEIGHBOUR, NOW_US - 1_000_000, 10))
    assert look(reader(FakeNvml(_0=card)), "0")[0].foreign == pytest.approx(0.3)


def test_a_card_that_nobody_used_lately_has_no_neighbour_at_work() -> None:
    card = Card(memory={100: GIB, NEIGHBOUR: GIB})
    reading = look(reader(FakeNvml(_0=card)), "0")[0]
    assert (reading.foreign, reading.foreign_bytes) == (0.0, GIB)


def test_where_our_own_engines_have_other_pids_nobody_is_called_foreign() -> None:
    """In a container with pids of its own, NVML tells those of the host."""
    card = Card(memory={70_100: GIB, 70_900: GIB}, sm=[(70_100, NOW_US, 90)])
    reading = look(reader(FakeNvml(_0=card)), "0")[0]
    assert (reading.foreign, reading.foreign_bytes) == (None, None)
    assert reading.report().foreign_util == 0.0


def test_samples_with_pids_of_another_namespace_than_the_list_are_nobodys() -> None:
    """Driver 560 lists a container's processes by its pids and samples them by the host's."""
    card = Card(memory={100: GIB}, sm=[(645_400, NOW_US, 90)])
    assert look(reader(FakeNvml(_0=card)), "0")[0].foreign == 0.0


def test_one_counter_that_is_not_supported_is_left_out_and_the_others_go_on(
    lines: list[str],
) -> None:
    card = shared(20, fails={"PcieThroughput": NOT_SUPPORTED})
    nvml = FakeNvml(_0=card)
    each = reader(nvml)
    for second in (1, 2, 3):
        reading = look(each, "0", at_s=second)[0]
        assert (reading.busy, reading.foreign, reading.pcie) == (0.97, 0.2, None)
    assert nvml.calls["PcieThroughput"] == 1, "what failed is not asked again and again"
    assert lines == [
        "GPU 0: nvmlDeviceGetPcieThroughput failed (Not Supported); "
        "link use is that of snapshots alone"
    ]


@pytest.mark.parametrize(
    ("call", "left_out"),
    [
        ("UtilizationRates", {"busy"}),
        ("RunningProcesses", {"foreign", "foreign_bytes"}),
        ("ProcessUtilization", {"foreign"}),
        ("LinkGeneration", {"pcie"}),
    ],
)
def test_each_counter_is_missed_alone(call: str, left_out: set[str], lines: list[str]) -> None:
    reading = look(reader(FakeNvml(_0=shared(20, fails={call: 999}))), "0")[0]
    names = ("busy", "foreign", "foreign_bytes", "pcie")
    assert {name for name in names if getattr(reading, name) is None} == left_out
    assert len(lines) == 1


def test_a_gpu_that_is_lost_has_no_counters_until_an_engine_starts_on_it_anew(
    lines: list[str],
) -> None:
    card = shared(20)
    each = reader(FakeNvml(_0=card, _1=Card(busy=40)))
    assert look(each, "0", "1")[0].busy == 0.97
    card.fails = dict.fromkeys(("UtilizationRates", "RunningProcesses"), GPU_IS_LOST)
    for _ in range(2):
        lost, other = look(each, "0", "1", at_s=2.0).values()
        assert lost == NOTHING
        assert other.busy == 0.4
    assert lines == ["GPU 0: GPU is lost; none of its counters is read any more"]
    card.fails = {}
    assert look(each, "0", "1", at_s=3.0)[0] == NOTHING
    assert look(each, "0", "1", incarnation=2, at_s=4.0)[0].busy == 0.97


def test_a_mig_slice_is_found_by_its_uuid_and_has_what_the_driver_counts_there() -> None:
    unsupported = ("UtilizationRates", "ProcessUtilization", "PcieThroughput")
    card = Card(memory={100: GIB}, fails=dict.fromkeys(unsupported, NOT_SUPPORTED))
    nvml = FakeNvml(MIG_4fa7c1d2=card)
    reading = look(reader(nvml), "MIG-4fa7c1d2")[0]
    assert reading == Reading(foreign_bytes=0)
    assert reading.report().gpu_busy < 0.0


def test_a_gpu_that_nvml_does_not_know_is_said_once_and_not_read(lines: list[str]) -> None:
    nvml = FakeNvml()
    each = reader(nvml)
    assert [look(each, "GPU-8932f937", at_s=at)[0] for at in (1, 2)] == [NOTHING, NOTHING]
    assert lines == ["GPU GPU-8932f937 is not known to NVML (Not Found): its counters are not read"]
    assert nvml.calls["handle"] == 1


def test_an_engine_on_two_gpus_is_as_busy_as_the_busier_one() -> None:
    nvml = FakeNvml(_0=shared(20), _1=Card(busy=99, memory={100: GIB, NEIGHBOUR: GIB}))
    reading = look(reader(nvml), "0,1")[0]
    assert (reading.busy, reading.foreign, reading.foreign_bytes) == (0.99, 0.2, 4 * GIB)


def test_link_use_is_the_busier_direction_as_a_share_of_what_the_link_can_do() -> None:
    full = 16 * 1969.2e6 / 1e3  # KB/s of PCIe 4 x16
    nvml = FakeNvml(_0=Card(pcie=(int(0.25 * full), int(0.5 * full))))
    assert look(reader(nvml), "0")[0].pcie == pytest.approx(0.5, rel=1e-3)


def test_a_single_look_of_20_ms_moves_link_use_only_a_part_of_the_way() -> None:
    card = Card()
    each = reader(FakeNvml(_0=card))
    look(each, "0")
    card.pcie = (40_000_000, 0)  # more than the link can do counts as all of it
    assert look(each, "0", at_s=1.5)[0].pcie == pytest.approx(1 / 3)
    assert look(each, "0", at_s=2.0)[0].pcie == pytest.approx(5 / 9)


def test_what_this_process_started_is_ours_and_its_parent_is_not() -> None:
    assert is_own_process(os.getpid())
    assert not is_own_process(os.getppid())
    assert not is_own_process(2**22 + 1)  # beyond the largest pid
