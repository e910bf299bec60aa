import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.ids import (
    RequestId,
    engine_name,
    engine_request_id,
    engine_slot,
    split_request_id,
)
from zerolayer.core.limits import ENGINES_MAX


@given(st.text(), st.integers(0, 10**9))
def test_stream_and_epoch_survive_the_way_to_an_engine_and_back(stream: str, epoch: int) -> None:
    assert split_request_id(engine_request_id(stream, epoch)) == RequestId(stream, epoch)


@given(st.text())
def test_an_id_is_split_only_if_we_could_have_made_it(text: str) -> None:
    parts = split_request_id(text)
    assert parts is None or engine_request_id(parts.stream_id, parts.epoch) == text


@pytest.mark.parametrize(
    "foreign", ["", "cmpl-1", "cmpl-1@", "cmpl-1@-1", "cmpl-1@01", "cmpl-1@ 1", "cmpl-1@\u0661"]
)
def test_an_id_without_a_plain_epoch_is_not_ours(foreign: str) -> None:
    assert split_request_id(foreign) is None


def test_an_epoch_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="below 0"):
        engine_request_id("cmpl-1", -1)


def test_every_slot_has_one_name_and_every_name_one_slot() -> None:
    names = [engine_name(slot) for slot in range(ENGINES_MAX)]
    assert len(set(names)) == ENGINES_MAX
    assert [engine_slot(name) for name in names] == list(range(ENGINES_MAX))


@pytest.mark.parametrize("name", ["", "e", "0", "e-1", "e01", "e256", "E0", "e0 ", "ee0"])
def test_what_is_not_an_engine_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not an engine"):
        engine_slot(name)


@pytest.mark.parametrize("slot", [-1, ENGINES_MAX])
def test_a_slot_outside_the_fleet_has_no_name(slot: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        engine_name(slot)
