import random
from itertools import count

import pytest

from zerolayer.dispatch.bench import STREAMS_PER_ENGINE, measure_dispatch
from zerolayer.dispatch.policies import RoundRobin


def test_figures_come_from_the_clock_that_is_handed_in() -> None:
    ticks = count(0, 1_000)
    figures = measure_dispatch([1, 8], lambda: next(ticks), random.Random(1), decisions=50)
    assert [figure.engines for figure in figures] == [1, 8]
    for figure in figures:
        assert figure.decisions == 50
        assert figure.p50_us == figure.p99_us == figure.max_us == 1.0
        rounds = -(-50 // (STREAMS_PER_ENGINE * figure.engines))
        assert figure.decisions_per_s == pytest.approx(50 / ((100 + rounds) * 1e-6))


def test_load_stays_even_while_it_is_measured() -> None:
    ticks = count()
    (figure,) = measure_dispatch(
        [8], lambda: next(ticks), random.Random(1), decisions=400, make_policy=RoundRobin
    )
    assert figure.spread == 0


def test_a_measurement_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measure_dispatch([8], lambda: 0, random.Random(1), decisions=0)
