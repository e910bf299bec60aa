import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.dispatch.domains import SPREAD_MAX, CensusRow, propose_domains

ROWS = st.builds(
    CensusRow,
    device=st.sampled_from(["H200", "L4"]),
    link_generation=st.none() | st.integers(4, 5),
    speed=st.none() | st.floats(0.5, 2.0),
    labels=st.sampled_from([(), ("fp8",), ("fp8", "cheap")]),
)


@given(census=st.lists(ROWS, max_size=16))
def test_a_domain_is_equal_hardware_within_the_spread(census: list[CensusRow]) -> None:
    proposal = propose_domains(census)
    assert len(proposal.domains) == len(census)
    for domain in set(proposal.domains):
        rows = [
            row for row, number in zip(census, proposal.domains, strict=True) if number == domain
        ]
        assert len({(row.device, row.link_generation, row.labels) for row in rows}) == 1
        speeds = [row.speed for row in rows if row.speed]
        assert not speeds or max(speeds) / min(speeds) <= 1.0 + SPREAD_MAX + 1e-9


@given(census=st.lists(ROWS, min_size=1, max_size=16))
def test_numbers_are_dense_and_the_largest_domain_is_the_first(census: list[CensusRow]) -> None:
    proposal = propose_domains(census)
    counts = [proposal.domains.count(n) for n in range(max(proposal.domains) + 1)]
    assert len(proposal.reasons) == len(counts)
    assert all(counts)
    assert counts == sorted(counts, reverse=True)


def test_one_slow_card_is_left_out_and_does_not_split_the_others() -> None:
    speeds = [1.00, 0.96, 1.01, 0.90, 1.00]
    proposal = propose_domains([CensusRow("H200", 5, speed) for speed in speeds])
    assert proposal.domains == (0, 1, 0, 2, 0)
    assert proposal.reasons[0] == "3 x H200, PCIe 5: spread 1.0%"


def test_cards_behind_different_links_are_balanced_apart() -> None:
    census = [CensusRow("H200", 5), CensusRow("H200", 4), CensusRow("H200", 5)]
    assert propose_domains(census).domains == (0, 1, 0)


def test_an_engine_that_was_not_measured_joins_the_largest_pool_of_its_kind() -> None:
    speeds = [1.0, None, 2.0, 1.01]
    census = [CensusRow("L4", None, speed) for speed in speeds]
    assert propose_domains(census).domains == (0, 0, 1, 0)


def test_a_negative_spread_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        propose_domains([], -0.1)
