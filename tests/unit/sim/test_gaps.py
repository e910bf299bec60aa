from hypothesis import given
from hypothesis import strategies as st

from zerolayer.sim.gaps import LongestSince


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=40), st.data())
def test_the_longest_step_since_any_step_is_the_maximum(
    seconds: list[float], data: st.DataObject
) -> None:
    gaps = LongestSince()
    for step, lasted in enumerate(seconds, start=1):
        gaps.note(step, lasted)
    after = data.draw(st.integers(0, len(seconds)))
    assert gaps.longest(after) == max(seconds[after:], default=0.0)
