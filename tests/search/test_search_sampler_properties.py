"""What holds for the sampler whatever the trials come to."""

import math

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search.attributes import MEMORY, STEP_TIME
from mindtune.search.constraints import check
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.history import Attempt, infer
from mindtune.search.model_shape import ModelShape
from mindtune.search.sampler import GuidedSampler, make_sampler
from mindtune.search.space import Space
from mindtune.search.study import Proposer

optuna.logging.set_verbosity(optuna.logging.ERROR)

MODEL = ModelShape(
    num_layers=4, hidden_size=128, num_heads=4, intermediate_size=512, vocab_size=256,
    seq_length=128,
)  # fmt: skip
CHOICES = {
    "data_parallel": [1, 2, 4], "model_parallel": [1, 2], "micro_batch_size": [1, 2, 4],
    "recompute": ["none", "interval:2", "full"], "comm_fusion": [0, 8], "env.MODE": ["a", "b"],
}  # fmt: skip
OUTCOMES = st.one_of(
    st.tuples(st.just("ok"), st.floats(allow_nan=True, allow_infinity=True)),
    st.tuples(st.just("ok"), st.floats(1e-300, 1e300)),
    st.tuples(st.just("pruned"), st.one_of(st.none(), st.floats(-1.0, 10.0))),
    st.tuples(st.sampled_from(["oom", "crash", "timeout", "running", "interrupted"]), st.none()),
)


@st.composite
def reports(draw):
    names = draw(st.sets(st.sampled_from(sorted(CHOICES)), min_size=1))
    spec = {
        name: draw(st.lists(st.sampled_from(CHOICES[name]), min_size=1, unique=True))
        for name in sorted({"data_parallel", *names})
    }
    facts = StudyFacts(
        cluster=Cluster(num_devices=8, allow_idle=True),
        training=Training(global_batch_size=16),
        model=draw(st.sampled_from([None, MODEL])),
    )
    return check(Space.from_spec(spec, facts))


@settings(max_examples=12, deadline=None)
@given(report=reports(), seed=st.integers(0, 3), staged=st.booleans(), data=st.data())
def test_proposals_are_feasible_new_and_deterministic_whatever_happens(report, seed, staged, data):
    if not report.configs:
        return
    space = report.space
    sampler = GuidedSampler(report, seed=seed, is_staged=staged)
    tried = []
    for number in range(12):
        config = sampler.propose(tried, number=number)
        again = GuidedSampler(report, seed=seed, is_staged=staged).propose(tried, number=number)
        assert config == again
        gone = {space.key(a.config) for a in tried if a.outcome != "interrupted"}
        if config is None:
            left = [e.config for e in report.configs if space.key(e.config) not in gone]
            assert all(infer(c, tried) is not None for c in left)
            return
        assert space.key(config) in report.keys - gone
        assert infer(config, tried) is None
        outcome, value = data.draw(OUTCOMES)
        gain = sampler.suggest(tried, number=number).gain
        assert gain is None or (math.isfinite(gain) and gain >= 0)
        tried.append(Attempt(number, config, outcome, value))


def open_proposer(report, study, sampler):
    study.sampler = make_sampler(sampler, report, seed=5)
    return Proposer(study, report, trials=12, seed=5)


@pytest.mark.parametrize("sampler", ["guided", "staged"])
@settings(max_examples=3, deadline=None)
@given(outcomes=st.lists(OUTCOMES.filter(lambda o: o[0] not in ("running", "interrupted")),
                         min_size=12, max_size=12), cut=st.integers(1, 11))  # fmt: skip
def test_a_resumed_study_goes_on_as_if_nothing_had_happened(sampler, outcomes, cut):
    facts = StudyFacts(
        cluster=Cluster(num_devices=8, allow_idle=True, peak_flops=1e12, intra_node_bandwidth=1e9,
                        device_memory=2.0**30),
        training=Training(global_batch_size=16),
        model=MODEL,
    )  # fmt: skip
    report = check(Space.from_spec(CHOICES, facts))

    def run(restarts):
        study = optuna.create_study(direction="maximize")
        proposer, configs = open_proposer(report, study, sampler), []
        for number, (outcome, value) in enumerate(outcomes):
            if number in restarts:
                proposer = open_proposer(report, study, sampler)
            proposal = proposer.ask()
            configs.append(proposal.config)
            attrs = {STEP_TIME: 0.1 * (1 + number % 3), MEMORY: 2e7} if outcome == "ok" else {}
            proposer.tell(proposal.number, outcome, value, attrs)
        return configs

    assert run(set()) == run({cut}) == run({1, cut})


@pytest.mark.parametrize("sampler", ["guided", "staged"])
def test_many_workers_at_once_all_get_configs_of_their_own(sampler):
    facts = StudyFacts(cluster=Cluster(num_devices=8, allow_idle=True),
                       training=Training(global_batch_size=16), model=MODEL)  # fmt: skip
    report = check(Space.from_spec(CHOICES, facts))
    study = optuna.create_study(direction="maximize")
    proposers = [open_proposer(report, study, sampler) for _ in range(3)]
    keys = []
    for turn in range(4):
        proposals = [proposer.ask() for proposer in proposers]
        keys += [proposal.key for proposal in proposals]
        for proposer, proposal in zip(proposers, reversed(proposals), strict=True):
            proposer.tell(proposal.number, "ok", 1.0 + turn)  # by another worker than asked
    assert len(set(keys)) == len(keys) == 12


def test_a_space_of_one_config_is_tried_once():
    facts = StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=4))
    report = check(Space.from_spec({"micro_batch_size": 4}, facts))
    study = optuna.create_study(direction="maximize")
    proposer = open_proposer(report, study, "guided")
    proposer.tell(proposer.ask().number, "ok", 0.5)
    assert proposer.ask() is None
    assert proposer.stopped == "every feasible config has been tried (1)"


def line(values):
    """Return attempts along the micro-batch size, each (size, outcome, value)."""
    return [
        Attempt(n, {"micro_batch_size": size, "env.MODE": "a"}, outcome, value)
        for n, (size, outcome, value) in enumerate(values)
    ]


def test_a_stopped_trial_counts_as_a_bound_and_not_as_a_measurement():
    facts = StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=64))
    spec = {"micro_batch_size": [1, 2, 4, 8, 16, 32, 64], "env.MODE": ["a", "b"]}
    sampler = GuidedSampler(check(Space.from_spec(spec, facts)))
    rising = [(1, "ok", 1.0), (2, "ok", 1.2), (4, "ok", 1.4)]
    # A preliminary value far above all others is no reason to search where it was seen ...
    assert sampler.propose(line(rising), number=3)["micro_batch_size"] == 16
    lucky = sampler.propose(line([*rising, (64, "pruned", 90.0)]), number=4)
    assert lucky["micro_batch_size"] in (8, 16)
    measured = sampler.propose(line([*rising, (64, "ok", 90.0)]), number=4)
    assert measured["micro_batch_size"] == 64
    # ... and a low one says that its like are no better.
    without = sampler.suggest(line(rising), number=3).gain
    low = line([*rising, (8, "pruned", 0.3), (16, "pruned", 0.3)])
    assert sampler.propose(low, number=5)["micro_batch_size"] <= 4
    assert sampler.suggest(low, number=5).gain < without


def test_the_staged_mode_turns_one_thing_at_a_time_memory_first():
    things = [{"micro_batch_size"}, {"recompute"}, {"data_parallel", "model_parallel"},
              {"comm_fusion"}, {"env.MODE"}]  # fmt: skip
    facts = StudyFacts(cluster=Cluster(num_devices=8, allow_idle=True),
                       training=Training(global_batch_size=16), model=MODEL)  # fmt: skip
    base = {"data_parallel": 2, "model_parallel": 1, "micro_batch_size": 1, "recompute": "full",
            "comm_fusion": 0, "env.MODE": "a"}  # fmt: skip
    report = check(Space.from_spec(CHOICES, facts, base))
    sampler = GuidedSampler(report, is_staged=True)

    def value(config):
        good = 1.0 + 0.2 * config["micro_batch_size"] + 0.3 * config["data_parallel"]
        return good + 0.2 * (config["comm_fusion"] == 8) + 0.3 * (config["env.MODE"] == "b")

    tried, turned = [Attempt(0, base, "ok", value(base))], []
    for number in range(1, 12):
        best = max(tried, key=lambda a: a.value).config
        config = sampler.propose(tried, number=number)
        changed = {name for name in config if config[name] != best[name]}
        turned.append(next((i for i, thing in enumerate(things) if changed <= thing), None))
        tried.append(Attempt(number, config, "ok", value(config)))
    assert None not in turned[:6]
    assert turned[0] in (0, 1)
    assert {2, 4} <= set(turned)
    assert turned.index(2) > turned.index(0)
    assert turned.index(4) > turned.index(2)
