from itertools import pairwise

import pytest

from zerolayer.core.errors import ConfigError
from zerolayer.sim.profiles import ENGINE_FACTOR, EngineKind, FittedEngine, profile_of

H100 = profile_of(EngineKind())


@pytest.mark.parametrize(
    ("batch", "context", "step_ms"), [(1, 1024, 6.135), (64, 1024, 9.744), (256, 512, 13.429)]
)
def test_a_decode_step_takes_what_the_table_says_times_the_engine_factor(
    batch: int, context: int, step_ms: float
) -> None:
    step_s = H100.step_s(0, 0, batch, batch * context)
    assert step_s == pytest.approx(step_ms * ENGINE_FACTOR / 1e3, rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "ms"), [(512, 10.94), (2048, 39.88), (8192, 185.64), (65_536, 2699.87)]
)
def test_a_prompt_takes_what_the_table_says_also_in_chunks(tokens: int, ms: float) -> None:
    assert H100.prefill_s(tokens) == pytest.approx(ms * ENGINE_FACTOR / 1e3, rel=0.05)


def test_the_linear_fit_is_within_five_percent_of_the_decode_table() -> None:
    median, worst = H100.fit_error
    assert median < 0.01
    assert worst < 0.05


def test_more_work_never_takes_less_time() -> None:
    for table in (H100.decode_s, H100.work_s):
        assert all(a <= b for a, b in pairwise(table))


def test_prompt_tokens_ride_on_the_weights_that_decoding_reads_anyway() -> None:
    together = H100.step_s(256, 0, 32, 32_000)
    apart = H100.step_s(256, 0, 0, 0) + H100.step_s(0, 0, 32, 32_000)
    assert together < 0.7 * apart


def test_kv_is_what_memory_leaves_beside_the_weights() -> None:
    # 80 GiB * 0.9 - 2 GiB - 16.06 GB of weights, at 128 KiB a token
    assert H100.kv_tokens == pytest.approx(451_000, rel=0.001)
    assert profile_of(EngineKind(tensor_parallel=2)).kv_tokens > 2 * H100.kv_tokens


def test_a_fitted_engine_takes_what_its_coefficients_say() -> None:
    fitted = profile_of(FittedEngine((0.05, 1e-3, 2e-3, 1e-6, 1e-8), kv_tokens=10_000))
    assert fitted.step_s(0, 0, 4, 1000) == pytest.approx(0.05 + 4 * 2e-3 + 1e-3)
    assert fitted.step_s(100, 0, 0, 0) == pytest.approx(0.05 + 0.1 + 1e-4)
    assert fitted.step_s(100, 0, 4, 1000) == pytest.approx(0.05 + 0.1 + 8e-3 + 1e-3 + 1e-4)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"h100-sxm-80gb llama-3.1-8b 1"):
        profile_of(EngineKind(gpu="abacus"))
