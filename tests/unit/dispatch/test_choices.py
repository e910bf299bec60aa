import pytest

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.choices import PlacementChoices, drain_thresholds, parse_domains
from zerolayer.dispatch.policies.registry import POLICIES


def test_the_default_policy_is_one_of_those_that_there_are() -> None:
    assert PlacementChoices().policy in POLICIES


@pytest.mark.parametrize(
    ("text", "domains"),
    [
        ("", ()),
        ("0,1;2,3", ((0, 1), (2, 3))),
        (" e0 , e1 ; e2", ((0, 1), (2,))),
        ("5", ((5,),)),
    ],
)
def test_domains_are_read_as_they_are_written(text: str, domains: object) -> None:
    assert parse_domains(text) == domains


@pytest.mark.parametrize("text", ["0,0", "0;0", "0,,1", ";", "a", "-1", "256", "99999", "0:1", "²"])
def test_domains_that_make_no_sense_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--domains"):
        parse_domains(text)


def test_slots_that_no_domain_names_are_one_of_their_own() -> None:
    choices = PlacementChoices(domains=parse_domains("0,1;3"))
    assert [choices.domain_of(slot) for slot in range(5)] == [0, 0, 2, 1, 2]
    assert {PlacementChoices().domain_of(slot) for slot in range(9)} == {0}


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
