"""Live runs at 30 times the learning rate, in which the first step compiles."""

from __future__ import annotations

import pytest

from mindtune.policies.decisions import SetLearningRateScale
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.signals import Observation

# (loss, gradient norm) of the first 14 steps of the reference workload (4 blocks, width 128, batch 16) at 30 times
# its learning rate, by seed, and the step in which it is seen.
TRACES = {
    0: (
        8,
        [
            (5.575, 9.467),
            (5.038, 8.576),
            (3.682, 2.026),
            (3.147, 1.247),
            (4.047, 5.139),
            (4.575, 3.096),
            (4.560, 3.619),
            (4.544, 3.907),
            (5.109, 2.930),
            (5.013, 3.541),
            (5.001, 3.925),
            (4.648, 2.620),
            (4.245, 1.096),
            (3.954, 1.341),
        ],
    ),
    1: (
        10,
        [
            (5.588, 7.978),
            (4.943, 8.535),
            (4.003, 2.692),
            (3.315, 1.821),
            (3.625, 2.996),
            (3.960, 1.902),
            (4.216, 2.514),
            (4.407, 2.476),
            (4.596, 2.417),
            (4.696, 2.473),
            (3.954, 1.298),
            (3.975, 1.504),
            (3.632, 1.138),
            (3.601, 0.664),
        ],
    ),
    2: (
        13,
        [
            (5.525, 8.835),
            (5.153, 10.660),
            (3.921, 2.464),
            (3.496, 1.021),
            (3.809, 2.238),
            (4.257, 3.079),
            (3.790, 1.553),
            (4.091, 2.087),
            (4.269, 3.856),
            (4.264, 2.129),
            (4.918, 1.716),
            (3.947, 1.889),
            (4.217, 1.757),
            (3.998, 1.209),
        ],
    ),
}


@pytest.mark.parametrize(("seen", "trace"), list(TRACES.values()))
def test_a_rate_thirty_times_too_high_is_seen_in_a_run_whose_first_step_compiles(
    seen, trace
) -> None:
    engine = build_engine({}, mode="act")
    state = engine.init(
        RunFacts(reachable=frozenset({"learning_rate_scale"}), optimizer_family="adam")
    )
    for step, (loss, norm) in enumerate(trace, start=1):
        observation = Observation(
            step=step,
            phase="compile" if step == 1 else "train",
            loss=loss,
            grad_norm=norm,
            overflow=0.0,
            learning_rate_scale=1.0,
        )
        result = engine.step(observation, state)
        state = result.state
        if result.grants:
            break
    assert step == seen
    assert result.grants == (SetLearningRateScale(0.0625),)
