import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.choices import (
    LABEL_CHARS_MAX,
    Domain,
    PlacementChoices,
    drain_thresholds,
    parse_domains,
)
from zerolayer.dispatch.policies.registry import POLICIES


def test_the_default_policy_is_one_of_those_that_there_are() -> None:
    assert PlacementChoices().policy in POLICIES


@pytest.mark.parametrize(
    ("text", "domains"),
    [
        ("", ()),
        ("0,1;2,3", (Domain((0, 1)), Domain((2, 3)))),
        (" e0 , e1 ; e2", (Domain((0, 1)), Domain((2,)))),
        ("5", (Domain((5,)),)),
        ("fp8=0,1;bf16=2,3", (Domain((0, 1), ("fp8",)), Domain((2, 3), ("bf16",)))),
        (" fp8 + cheap = e0, 1 ; 2", (Domain((0, 1), ("fp8", "cheap")), Domain((2,)))),
        ("e0=1", (Domain((1,), ("e0",)),)),
        ("fp8=0;fp8=1", (Domain((0,), ("fp8",)), Domain((1,), ("fp8",)))),
    ],
)
def test_domains_are_read_as_they_are_written(text: str, domains: object) -> None:
    assert parse_domains(text) == domains


WORDS = st.text("abz09._-", min_size=1, max_size=LABEL_CHARS_MAX)


@given(labels=st.lists(st.lists(WORDS, unique=True, max_size=3), min_size=1, max_size=4))
def test_a_domain_keeps_its_labels_in_order(labels: list[list[str]]) -> None:
    text = ";".join(f"{'+'.join(own)}{'=' if own else ''}{n}" for n, own in enumerate(labels))
    assert [list(each.labels) for each in parse_domains(text)] == labels


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("FP8=0", "FP8"),
        ("=0", ""),
        ("fp8+=0", ""),
        ("fp8,bf16=0", "fp8,bf16"),
        ("a b=0", "a b"),
        ("größe=0", "größe"),
        ("x" * 65 + "=0", "x" * 65),
        ("fp8+fp8=0", "fp8+fp8"),
        ("auto=0", "auto"),
    ],
)
def test_a_label_that_cannot_be_meant_is_refused_with_what_to_write(text: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_domains(text)
    assert (refused.value.field, refused.value.value) == ("--domains", value)
    assert refused.value.fix


@pytest.mark.parametrize(
    "text", ["0,0", "0;0", "0,,1", ";", "a", "-1", "256", "99999", "0:1", "²", "a=", "a=b=0", "0=a"]
)
def test_domains_that_make_no_sense_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--domains"):
        parse_domains(text)


def test_slots_that_no_domain_names_are_one_of_their_own() -> None:
    choices = PlacementChoices(domains=parse_domains("0,1;3"))
    assert [choices.domain_of(slot) for slot in range(5)] == [0, 0, 2, 1, 2]
    assert {PlacementChoices().domain_of(slot) for slot in range(9)} == {0}


def test_a_slot_has_the_labels_of_its_domain_and_one_that_is_not_named_has_none() -> None:
    choices = PlacementChoices(domains=parse_domains("fp8+cheap=0;1;bf16=3"))
    assert [choices.labels_of(slot) for slot in (0, 1, 2, 3)] == [
        ("fp8", "cheap"), (), (), ("bf16",),
    ]  # fmt: skip
    assert choices.labels == {0: ("fp8", "cheap"), 2: ("bf16",)}


def test_the_lower_marks_follow_the_upper_ones() -> None:
    marks = drain_thresholds(92, 95, 3)
    assert (marks.util_over, marks.mem_over, marks.samples) == (0.92, 0.95, 3)
    assert marks.util_under == pytest.approx(0.85)
    assert marks.mem_under == pytest.approx(0.88)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((9, 95, 3), "--drain-gpu-percent"),
        ((float("nan"), 95, 3), "--drain-gpu-percent"),
        ((92, 101, 3), "--drain-memory-percent"),
        ((92, 95, 0), "--drain-samples"),
    ],
)
def test_drain_settings_out_of_range_are_refused_by_name(
    values: tuple[float, float, int], name: str
) -> None:
    with pytest.raises(ConfigError, match=name):
        drain_thresholds(*values)
