"""All configs judged at once: as the rules and the cost model judge each alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search.constraints import check, first_failure
from mindtune.search.cost_model import Measurement, calibrate
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.history import Attempt, infer
from mindtune.search.model_shape import ModelShape
from mindtune.search.ranking import Ranking
from mindtune.search.space import Space

MODEL = ModelShape(
    num_layers=8, hidden_size=1024, num_heads=16, intermediate_size=4096, vocab_size=32000,
    seq_length=2048, flash_attention=True,
)  # fmt: skip
CLUSTER = Cluster(
    num_devices=8, devices_per_node=8, device_memory=12 * 2.0**30, peak_flops=3e14,
    intra_node_bandwidth=2e11, allow_idle=True,
)  # fmt: skip
SPEC = {
    "data_parallel": "auto", "model_parallel": [1, 2, 4], "pipeline_stage": [1, 2],
    "micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "selective", "interval:2", "full"],
    "optimizer_sharding": "auto", "comm_overlap": "auto", "data_workers": [1, 2],
}  # fmt: skip


def make_report(limits=None, cluster=CLUSTER, spec=None):
    facts = StudyFacts(
        cluster=cluster, training=Training(global_batch_size=64, precision="bfloat16"),
        model=MODEL, limits=limits or Limits(),
    )  # fmt: skip
    return check(Space.from_spec(spec or SPEC, facts))


def allowed(ranking):
    return [ranking.configs[index] for index in ranking.untried([])]


def test_at_first_it_is_the_report():
    report = make_report()
    ranking = Ranking(report)
    assert allowed(ranking) == [entry.config for entry in report.configs]
    assert ranking.feasible == report.feasible


@settings(max_examples=12, deadline=None)
@given(
    memory=st.floats(0.2, 3.0), time=st.floats(0.2, 5.0),
    share=st.sampled_from([None, 0.5, 0.85]), least=st.sampled_from([None, 0.3]),
    headroom=st.sampled_from([None, 0.4]), most=st.sampled_from([None, 6 * 2.0**30]),
    is_timed=st.booleans(),
)  # fmt: skip
def test_after_calibration_verdicts_and_order_are_those_of_a_new_check(
    memory, time, share, least, headroom, most, is_timed
):
    limits = Limits(
        memory_utilization=share, min_memory_utilization=least, min_overlap_headroom=headroom,
        max_memory=most,
    )  # fmt: skip
    cluster = CLUSTER if is_timed else dataclasses.replace(CLUSTER, peak_flops=None)
    report = make_report(limits, cluster)
    if not report.configs:
        return
    ranking = Ranking(report)
    config = report.space.complete(report.configs[0].config)
    predicted = report.cost.predict(config)
    seen = Measurement(
        config, memory * predicted.memory_bytes, time * (predicted.step_time_s or 1.0)
    )
    learnt = calibrate(report.cost, [seen])
    again = check(report.space, learnt)
    ranking.learn(learnt)
    if not again.configs:
        assert ranking.feasible == report.feasible
        return
    assert ranking.feasible == again.feasible
    found = allowed(ranking)
    assert {report.space.key(c) for c in found} == again.keys
    assert all(first_failure(report.space.complete(c), learnt) is None for c in found)
    costs = [learnt.relative_cost(report.space.complete(c)) for c in found]
    assert costs == pytest.approx(sorted(costs), rel=1e-8)
    index = ranking.untried([])
    assert np.exp(ranking.log_costs[index]) == pytest.approx(costs)


def test_a_rule_that_was_too_strict_lets_configs_in_again():
    report = make_report(Limits(memory_utilization=0.3))
    ranking = Ranking(report)
    config = report.space.complete(report.configs[0].config)
    half = Measurement(config, 0.5 * report.cost.memory_bytes(config), None)
    ranking.learn(calibrate(report.cost, [half]))
    assert ranking.feasible > report.feasible


def test_a_model_that_would_leave_nothing_is_not_believed():
    report = make_report()
    ranking = Ranking(report)
    config = report.space.complete(report.configs[0].config)
    ranking.learn(calibrate(report.cost, [Measurement(config, 2.0**60, None)]))
    assert ranking.feasible == report.feasible


@pytest.mark.parametrize("index", [0, 7, 40])
def test_a_failure_for_memory_rules_out_exactly_what_is_inferred(index):
    report = make_report()
    ranking = Ranking(report)
    failed = Attempt(3, report.configs[index].config, "oom")
    left = [ranking.configs[i] for i in ranking.untried([failed])]
    assert left == [e.config for e in report.configs if infer(e.config, [failed]) is None]


def test_an_interrupted_config_may_be_tried_again_and_a_running_one_not():
    report = make_report()
    ranking = Ranking(report)
    first = report.configs[0].config
    assert first in [
        ranking.configs[i] for i in ranking.untried([Attempt(0, first, "interrupted")])
    ]
    assert first not in [
        ranking.configs[i] for i in ranking.untried([Attempt(0, first, "running")])
    ]
