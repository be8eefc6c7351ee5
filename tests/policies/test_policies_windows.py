from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from mindtune.policies.windows import Window, median, push

# Halving a subnormal number loses it; no signal is that small.
finite = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)


@given(st.lists(finite, min_size=1, max_size=60), st.integers(1, 16))
def test_median_and_mad_equal_their_definitions(values: list[float], size: int) -> None:
    window = Window()
    for value in values:
        window = window.push(value, size)
    kept = values[-size:]
    center = statistics.median(kept)
    assert window.values == tuple(kept)
    assert window.ordered == tuple(sorted(kept))
    assert window.median() == center
    assert median(tuple(kept)) == center
    expected = statistics.median([abs(value - center) for value in kept])
    assert abs(window.mad(center) - expected) <= 1e-9 * max(1.0, abs(expected))


def test_of_takes_samples_in_time_order() -> None:
    window = Window.of((3.0, 1.0, 2.0))
    assert window.values == (3.0, 1.0, 2.0)
    assert window.ordered == (1.0, 2.0, 3.0)


def test_push_keeps_the_newest() -> None:
    assert push((1.0, 2.0), 3.0, 3) == (1.0, 2.0, 3.0)
    assert push((1.0, 2.0, 3.0), 4.0, 2) == (3.0, 4.0)
