import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.policies import PlacementRequest
from zerolayer.dispatch.policies.base import Preference
from zerolayer.dispatch.preference import (
    Hints,
    KernelHint,
    apply_hints,
    hints_from_headers,
)

LABELS = {0: ("bf16", "llama"), 1: ("fp8", "llama"), 2: ("qwen_3", "fp8"), 3: ("cheap",)}


@pytest.mark.parametrize("preference", list(Preference))
@pytest.mark.parametrize("header", ["X-Zero-Layer-Preference", "x-zero-layer-preference"])
def test_each_preference_has_its_header_value(header: str, preference: Preference) -> None:
    for value in (preference.value, preference.value.upper().replace("-", "_"), f" {preference} "):
        assert hints_from_headers({header: value}).preference is preference


def test_without_headers_nothing_is_asked() -> None:
    assert hints_from_headers({"accept": "text/event-stream"}) == Hints()
    request = PlacementRequest(10)
    assert apply_hints(request, Hints(), LABELS) == request


@pytest.mark.parametrize(
    ("value", "preference", "contiguous"),
    [
        ("latency_optimized", Preference.LOW_LATENCY, False),
        ("throughput-optimized", Preference.HIGH_THROUGHPUT, False),
        ("memory_efficient", Preference.COST_OPTIMAL, False),
        ("aggressive", Preference.BALANCED, True),
        ("balanced", Preference.BALANCED, False),
        ("conservative", Preference.BALANCED, False),
    ],
)
def test_older_clients_kernel_hints_are_mapped(
    value: str, preference: Preference, contiguous: bool
) -> None:
    hints = hints_from_headers({"x-kernel-hint": value})
    assert (hints.preference, hints.contiguous) == (preference, contiguous)


def test_the_new_header_wins_over_the_old_one() -> None:
    headers = {
        "x-kernel-hint": KernelHint.MEMORY,
        "x-zero-layer-preference": Preference.LOW_LATENCY,
    }
    assert hints_from_headers(headers).preference is Preference.LOW_LATENCY


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("x-zero-layer-preference", "low-latency, high-throughput, cost-optimal"),
        ("x-kernel-hint", "latency-optimized"),
        ("x-precision-preference", "bf16"),
    ],
)
@given(value=st.text(alphabet="xyz", max_size=9))
def test_an_unknown_value_is_refused_with_all_values_that_are_allowed(
    header: str, allowed: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=allowed):
        hints_from_headers({header: value})


def test_a_model_hint_is_any_short_name() -> None:
    assert hints_from_headers({"x-model-hint": "Qwen/Qwen3-8B"}).model == "Qwen/Qwen3-8B"
    assert hints_from_headers({"x-model-hint": "Auto"}) == Hints()
    for wrong in ("", "x" * 257):
        with pytest.raises(ConfigError, match="x-model-hint"):
            hints_from_headers({"x-model-hint": wrong})


@pytest.mark.parametrize(
    ("precision", "model", "domains"),
    [
        ("fp8", None, {1, 2}),
        (None, "llama", {0, 1}),
        ("fp8", "llama", {1}),
        ("bf16", "qwen-3", {2}),  # the model decides where none has both
        ("FP8", "Cheap", {3}),
        ("fp8", "mistral", {1, 2}),
        ("int4", None, set()),
        (None, "mistral", set()),
        ("auto", None, set()),
        (None, "auto", set()),
        ("auto", "llama", {0, 1}),
    ],
)
def test_hints_prefer_the_domains_that_have_such_a_label(
    precision: str | None, model: str | None, domains: set[int]
) -> None:
    headers = {"x-precision-preference": precision, "x-model-hint": model}
    hints = hints_from_headers({name: value for name, value in headers.items() if value})
    assert apply_hints(PlacementRequest(10), hints, LABELS).preferred_domains == domains
