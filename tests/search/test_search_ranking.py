"""All configs judged at once: as the rules and the cost model judge each alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search import ranking as ranking_module
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
    assert ranking.feasible == again.feasible
    if not again.configs:
        assert {report.space.key(c) for c in allowed(ranking)} == report.keys
        return
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
    seen = Measurement(config, 2.0**60, 7.0)
    ranking.learn_from([seen])
    assert allowed(ranking), "it is asked for what is left"
    assert ranking.feasible == report.feasible
    # Others judge by the same model; what it has learnt of time stays.
    assert ranking.cost.memory_rates == report.cost.memory_rates
    assert ranking.cost.time_rates == calibrate(report.cost, [seen]).time_rates
    assert all(first_failure(report.space.complete(c), ranking.cost) is None
               for c in allowed(ranking))  # fmt: skip


def test_a_model_that_leaves_but_what_was_tried_is_not_believed():
    report = make_report()
    by_memory = sorted(
        (entry.config for entry in report.configs),
        key=lambda config: report.cost.memory_bytes(report.space.complete(config)),
    )
    leanest = report.space.complete(by_memory[0])
    # As if the leanest config alone filled the device: all others seem too large.
    limit = report.cost.facts.memory_limit[0]
    bad_reading = Measurement(leanest, 0.99 * limit, None)
    ranking = Ranking(report)
    ranking.learn_from([bad_reading])
    tried = [
        Attempt(number, ranking.configs[index], "ok", 1.0)
        for number, index in enumerate(ranking.untried([]))
    ]
    assert 0 < len(tried) < report.feasible
    left = [ranking.configs[index] for index in ranking.untried(tried)]
    gone = [attempt.config for attempt in tried]
    assert left == [e.config for e in report.configs if e.config not in gone]
    # New readings are believed again.
    good = Measurement(leanest, report.cost.memory_bytes(leanest), None)
    ranking.learn_from([good, good])
    assert ranking.cost.memory_rates == calibrate(report.cost, [good, good]).memory_rates


@pytest.mark.parametrize("share", [0.85, 30.0])
def test_the_space_is_walked_once_however_often_it_learns(share, monkeypatch):
    """Also where memory alone rejects nothing."""
    report = make_report(Limits(memory_utilization=min(share, 1.0)),
                         dataclasses.replace(CLUSTER, device_memory=share * 12 * 2.0**30))  # fmt: skip
    walks, ranks = [], []
    walk, rank = ranking_module.passing_without_memory, Ranking._rank

    def walked(*args):
        walks.append(args)
        return walk(*args)

    def ranked(self):
        ranks.append(self)
        rank(self)

    monkeypatch.setattr(ranking_module, "passing_without_memory", walked)
    ranking = Ranking(report)
    monkeypatch.setattr(Ranking, "_rank", ranked)
    config = report.space.complete(report.configs[0].config)
    for number in range(1, 4):
        ranking.learn_from([Measurement(config, report.cost.memory_bytes(config), None)] * number)
        ranking.learn_from([Measurement(config, report.cost.memory_bytes(config), None)] * number)
    assert (len(walks), len(ranks)) == (1, 3)
    assert (len(ranking.configs) > report.feasible) == (share < 1)


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
