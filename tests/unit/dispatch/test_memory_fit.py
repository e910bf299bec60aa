import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.errors import ConfigError
from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.memory_fit import (
    KV_BYTES,
    UNKNOWN_TOKENS,
    best_engine,
    find_best_fit,
    free_tokens,
    kv_bytes_per_token,
)

ENGINE = st.tuples(st.floats(1.0, 1e6), st.floats(0.0, 1.0), st.floats(0.0, 1.0))


def fleet_of(rows: list[tuple[float, float, float]]) -> FleetState:
    """Rows of (KV tokens, share in use, largest run as a share of what is free)."""
    fleet = FleetState(len(rows))
    for slot, (tokens, used, run) in enumerate(rows):
        fleet.kv_tokens[slot], fleet.kv_used_fraction[slot] = tokens, used
        fleet.free_run_tokens[slot] = run * tokens * (1.0 - used)
    return fleet


@given(
    rows=st.lists(ENGINE, min_size=1, max_size=9),
    tokens=st.integers(1, 100_000),
    contiguous=st.booleans(),
)
def test_the_best_engine_has_room_and_no_other_has_more_to_spare(
    rows: list[tuple[float, float, float]], tokens: int, contiguous: bool
) -> None:
    fleet = fleet_of(rows)
    fit = find_best_fit(fleet, tokens, contiguous=contiguous)
    engine = best_engine(fit, np.ones(len(rows), dtype=np.bool_))
    free = free_tokens(fleet)
    assert (engine is None) == (free.max() < tokens)
    if engine is not None:
        rivals = fit.in_one_piece if contiguous and fit.in_one_piece.any() else fit.fits
        assert rivals[engine]
        assert free[engine] >= free[rivals].max() - 1e-6


def test_one_piece_is_preferred_and_never_demanded() -> None:
    shattered, whole = (10_000.0, 0.0, 0.01), (10_000.0, 0.5, 1.0)
    both = np.ones(2, dtype=np.bool_)
    fleet = fleet_of([shattered, whole])
    assert best_engine(find_best_fit(fleet, 1_000), both) == 0
    assert best_engine(find_best_fit(fleet, 1_000, contiguous=True), both) == 1
    assert best_engine(find_best_fit(fleet, 6_000, contiguous=True), both) == 0


def test_a_finer_precision_needs_more_of_the_same_memory() -> None:
    fleet = fleet_of([(1_000.0, 0.0, 1.0)])
    assert find_best_fit(fleet, 900).fits[0]
    assert not find_best_fit(fleet, 900, "fp32").fits[0]
    assert find_best_fit(fleet, 900, "fp32", cache_precision="fp32").fits[0]
    assert find_best_fit(fleet, 1_900, "fp8").fits[0]


def test_an_unknown_capacity_has_room_until_it_says_that_it_is_full() -> None:
    fleet = FleetState(2)
    fleet.kv_used_fraction[1] = 1.0
    assert free_tokens(fleet).tolist() == [UNKNOWN_TOKENS, 0.0]


def test_bytes_per_token_are_keys_and_values_of_all_layers() -> None:
    # SmolLM2-135M in bf16: 30 layers, 3 KV heads of 64, 22.5 KiB a token.
    assert kv_bytes_per_token("bf16", 30, 3, 64) == 22.5 * 1024
    with pytest.raises(ConfigError, match=", ".join(KV_BYTES)):
        kv_bytes_per_token("fp64", 1, 1, 1)
