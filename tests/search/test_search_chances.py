"""Whether a config runs: what is known of its memory, as a probability, and what teaches it."""

import dataclasses
import math

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial
from scipy import integrate, optimize, stats

from mindtune.search.attributes import MEMORY, OUTCOME, STEP_TIME
from mindtune.search.calibration import Doubt, Prior, _log_below, fit
from mindtune.search.constraints import check, first_failure
from mindtune.search.cost_model import CostModel, Measurement, calibrate
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.forecasts import memory_forecast
from mindtune.search.history import Attempt
from mindtune.search.model_shape import ModelShape
from mindtune.search.prospects import Prospects
from mindtune.search.ranking import Ranking
from mindtune.search.sampler import GuidedSampler, make_sampler
from mindtune.search.space import Space
from mindtune.search.study import Proposer
from mindtune.search.trial_history import measurements

optuna.logging.set_verbosity(optuna.logging.ERROR)

MODEL = ModelShape(
    num_layers=8, hidden_size=1024, num_heads=16, intermediate_size=4096, vocab_size=32000,
    seq_length=2048, flash_attention=True,
)  # fmt: skip
SPEC = {
    "data_parallel": [8],
    "micro_batch_size": [1, 2, 4, 8, 16, 32],
    "recompute": ["none", "interval:2", "full"],
    "optimizer_offload": [False, True],
}


def make_facts(device_memory=64 * 2.0**30, limits=None):
    return StudyFacts(
        cluster=Cluster(num_devices=8, device="Ascend910B", device_memory=device_memory,
                        peak_flops=3e14, intra_node_bandwidth=2e11),
        training=Training(global_batch_size=256, precision="bfloat16"),
        model=MODEL, limits=limits or Limits(),
    )  # fmt: skip


def make_report(share, spec=None, limits=None):
    """Return a space whose largest config of `share` below 1 is predicted at that of the limit."""
    cost = CostModel(make_facts())
    space = Space.from_spec(spec or SPEC, cost.facts)
    sizes = sorted(cost.memory_bytes(space.complete(config)) for config in space.configs())
    at = sizes[int(0.6 * len(sizes))]
    return check(Space.from_spec(spec or SPEC, make_facts(at / share, limits)))


@pytest.mark.parametrize("score", [-1e6, -300.0, -7.0, -1.0, 0.0, 0.4, 3.0, 50.0])
def test_the_censored_likelihood_is_the_integral_of_the_uncensored_one(score):
    log_probability, slope, curvature = (float(own[0]) for own in _log_below(np.array([score])))

    def density(x):
        return stats.t(4).pdf(x)

    lower, _ = integrate.quad(lambda u: density(-1 / u) / u**2, 0, 1 / max(1.0, -score),
                              epsabs=0, epsrel=1e-10)  # fmt: skip
    rest = 0.0 if score <= -1 else integrate.quad(density, -1.0, score, epsrel=1e-10)[0]
    assert log_probability == pytest.approx(math.log(lower + rest), rel=1e-8, abs=1e-12)
    assert slope == pytest.approx(density(score) / (lower + rest), rel=1e-7)
    step = 1e-4 * max(1.0, abs(score))
    near = [float(_log_below(np.array([score + s]))[1][0]) for s in (-step, step)]
    assert curvature == pytest.approx(max(0.0, (near[0] - near[1]) / (2 * step)), rel=1e-4)


@pytest.mark.parametrize("bound", [-0.6, -0.1, 0.0, 0.1, 0.6])
def test_what_ran_out_of_memory_moves_the_rates_to_the_most_probable_ones(bound):
    """One rate, one reading at 0, one trial that needed more than the bound."""
    spread, noise, mean = 0.3, 0.05, -0.02

    def loss(rate):
        above = stats.t.sf((bound - rate) / noise, 4)
        return (
            -stats.norm.logpdf(rate, mean, spread)
            - stats.t.logpdf(-rate / noise, 4)
            - math.log(above)
        )

    found = fit(
        lambda rates: (np.full(2, rates[0]), np.ones((2, 1))),
        np.array([0.0, bound]), Prior((mean,), (spread,), 0.1), noise, exceeds=np.array([False, True]),
    )  # fmt: skip
    grid = np.linspace(-1.0, 1.0, 201)
    start = grid[np.argmin([loss(rate) for rate in grid])]
    best = optimize.minimize_scalar(loss, bracket=(start - 0.02, start, start + 0.02), tol=1e-10)
    assert found.log_rates[0] == pytest.approx(best.x, abs=2e-4)


def test_a_bound_that_was_expected_anyway_says_nothing_and_an_odd_one_spoils_nothing():
    report = make_report(0.95)
    space, cost = report.space, report.cost
    config = space.complete(report.configs[0].config)
    predicted = cost.memory_bytes(config)

    def learnt(share, *others):
        return calibrate(cost, [Measurement(config, memory_above=share * predicted), *others])

    assert learnt(0.5).memory_bytes(config) == pytest.approx(predicted, rel=1e-3)
    assert learnt(1.05).memory_bytes(config) > 1.02 * predicted
    # Out of memory at a fifth: by a fault of its own, as the readings say.
    seen = [Measurement(space.complete(entry.config), cost.memory_bytes(space.complete(entry.config)))
            for entry in report.configs[1:6]]  # fmt: skip
    assert learnt(5.0, *seen).memory_bytes(config) < 1.15 * predicted
    assert learnt(1.05).calibrated_by == 1


def test_the_chance_to_fit_is_that_of_the_normal_distribution():
    report = make_report(0.95)
    ranking = Ranking(report)
    config = report.space.complete(report.configs[3].config)
    seen = Measurement(config, 1.04 * report.cost.memory_bytes(config))
    limit = report.cost.facts.memory_limit[0]
    first = ranking.chance_to_fit(np.arange(len(ranking.configs)))
    ranking.learn(calibrate(report.cost, [seen]))
    rates, doubt = ranking.cost.log_memory_rates, ranking.cost.memory_doubt
    found = ranking.chance_to_fit(np.arange(len(ranking.configs)))
    for own, config in zip(found, map(report.space.complete, ranking.configs), strict=True):
        log_memory, slopes = memory_forecast([ranking.cost.stage_parts(config)])(rates)
        variance = slopes[0] @ np.array(doubt.covariance) @ slopes[0] + doubt.misfit**2
        assert ranking.cost.memory_spread(config) == pytest.approx(math.sqrt(variance))
        score = (math.log(limit) - log_memory[0]) / math.sqrt(variance)
        assert own == pytest.approx(stats.norm.cdf(score), abs=1e-9)
    # Before any reading nothing is above the limit, and predictions are less sure.
    assert (first >= 0.5).all()
    assert report.cost.memory_spread(config) > ranking.cost.memory_spread(config)


def test_rates_that_were_never_seen_leave_predictions_open():
    doubt = Doubt(((0.04, 0.01), (0.01, 0.09)), 0.05)
    slopes = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    variances = np.array([0.04, 0.25 * (0.04 + 0.09 + 0.02), 0.0]) + 0.05**2
    assert doubt.spreads(slopes) == pytest.approx(np.sqrt(variances))
    prior = Prior((0.0, 1.0), (0.2, 0.3), 0.05)
    assert prior.doubt == Doubt(((0.2**2, 0.0), (0.0, 0.3**2)), 0.05)


def test_the_misfit_is_learnt_from_errors_that_no_rates_explain():
    """One rate that is known well: the errors are what is left."""
    errors = np.array([0.02, -0.03, 0.01, 0.05, -0.04, 0.9])

    def learnt(count, exceeds=None):
        forecast = lambda rates: (np.full(count, rates[0]), np.ones((count, 1)))  # noqa: E731
        prior = Prior((0.0,), (1e-6,), 0.1)
        return fit(forecast, errors[:count], prior, 0.05, exceeds=exceeds).doubt.misfit

    expected = math.sqrt((4 * 0.01 + (errors[:5] ** 2).sum()) / 9)
    assert learnt(5) == pytest.approx(expected, rel=1e-4)
    # What is far off is of something else, and a bound says nothing of errors.
    capped = math.sqrt((4 * 0.01 + (errors[:5] ** 2).sum() + 0.09) / 10)
    assert learnt(6) == pytest.approx(capped, rel=1e-4)
    only = np.array([True, False, True, True, True])
    assert learnt(5, only) == pytest.approx(math.sqrt((4 * 0.01 + 0.03**2) / 5), rel=1e-4)
    # What the rates can explain is none.
    forecast = lambda rates: (np.full(5, rates[0]), np.ones((5, 1)))  # noqa: E731
    free = fit(forecast, np.full(5, 0.5), Prior((0.0,), (9.0,), 0.1), 0.05).doubt.misfit
    assert free < 0.1


def test_without_limit_or_prediction_memory_is_no_statement():
    for facts in (make_facts(device_memory=None), dataclasses.replace(make_facts(), model=None)):
        ranking = Ranking(check(Space.from_spec(SPEC, facts)))
        assert ranking.chance_to_fit(np.arange(4)).tolist() == [1.0] * 4
        assert ranking.is_expected_to_fit(ranking.configs[0]) is None


def test_of_two_equally_fast_configs_the_one_with_room_is_tried_first():
    spec = {"data_parallel": [8], "recompute": ["full"], "optimizer_offload": [False, True]}
    cost = CostModel(make_facts())
    tight = {"data_parallel": 8, "recompute": "full", "optimizer_offload": False}
    space = Space.from_spec(spec, cost.facts)
    needed = cost.memory_bytes(space.complete(tight))
    report = check(Space.from_spec(spec, make_facts(1.001 * needed)))
    assert report.feasible == 2
    assert report.configs[0].config == tight, "by speed alone it would come first"
    roomy = {**tight, "optimizer_offload": True}
    score = math.log(1.001 * needed / cost.memory_bytes(space.complete(roomy)))
    assert score > 2 * cost.memory_spread(space.complete(roomy))
    assert GuidedSampler(report).propose([], number=0) == roomy


def test_out_of_memory_at_95_percent_makes_what_needs_more_unlikely_and_nothing_else():
    report = make_report(0.95, limits=Limits(memory_utilization=1.0))
    space, limit = report.space, report.cost.facts.memory_limit[0]

    def share(config):
        return report.cost.memory_bytes(space.complete(config)) / limit

    ranking = Ranking(report)
    near = min(ranking.configs, key=lambda config: abs(share(config) - 0.95))
    assert share(near) == pytest.approx(0.95, abs=0.01)
    first = ranking.chance_to_fit(np.arange(len(ranking.configs)))
    before = dict(zip(map(str, ranking.configs), first, strict=True))
    seen = Measurement(space.complete(near), memory_above=limit)
    sampler = GuidedSampler(report, ranking=ranking)
    ranking.learn_from([seen])
    after = ranking.chance_to_fit(np.arange(len(ranking.configs)))
    far = 0
    for config, chance in zip(ranking.configs, after, strict=True):
        if share(config) > 0.93:
            assert chance < 0.5
        if share(config) < 0.6:
            far += 1
            assert chance > 0.94
        if share(config) > 0.75 and str(config) in before:
            assert chance < before[str(config)]
    assert far > 3
    tried = [Attempt(0, near, "oom")]
    proposal = sampler.propose(tried, number=1)
    assert share(proposal) < 0.9
    known = Prospects(ranking, tried, 1.0, None, 1.0)
    assert known.log_chance(np.arange(3)) == pytest.approx(np.log(after[:3])), (
        "nothing else failed"
    )


def test_a_failure_that_memory_does_not_explain_is_learnt_by_its_knobs():
    spec = {"data_parallel": [8], "micro_batch_size": [1, 2, 4, 8], "env.POOL": ["a", "b"]}
    report = check(Space.from_spec(spec, make_facts(400 * 2.0**30)))
    ranking = Ranking(report)
    tried = []
    for number, (size, pool) in enumerate([(1, "a"), (1, "b"), (2, "a"), (2, "b"), (4, "a")]):
        config = {"data_parallel": 8, "micro_batch_size": size, "env.POOL": pool}
        outcome = ("oom", None) if pool == "a" else ("ok", 1.0)
        tried.append(Attempt(number, config, *outcome))
    chance = np.exp(Prospects(ranking, tried, 1.0, None, 1.0).log_chance(np.arange(8)))
    by_pool = {
        pool: [own for own, config in zip(chance, ranking.configs, strict=True)
               if config["env.POOL"] == pool]
        for pool in "ab"
    }  # fmt: skip
    assert max(by_pool["a"]) < 0.3
    assert min(by_pool["b"]) > 0.7


@pytest.mark.parametrize(
    "limits", [None, Limits(memory_utilization=0.96), Limits(max_memory=2.0**33)]
)
def test_what_is_near_the_limit_is_not_taken_back_and_a_chosen_limit_admits_no_more(limits):
    report = make_report(0.95, limits=limits)
    space, limit = report.space, report.cost.facts.memory_limit[0]
    config = space.complete(report.configs[-1].config)
    seen = Measurement(config, 1.04 * report.cost.memory_bytes(config))
    learnt = calibrate(report.cost, [seen])
    again = check(space, learnt)
    above = [
        e.config for e in again.configs if learnt.memory_bytes(space.complete(e.config)) > limit
    ]
    assert above, "predictions have risen, but near the limit that says little"
    assert all(space.key(own) in report.keys for own in above) is (limits is not None)
    assert learnt.uncorrected == report.cost
    ranking = Ranking(report)
    ranking.learn(learnt)
    assert {space.key(ranking.configs[i]) for i in ranking.untried([])} == again.keys
    rejected = [c for c in map(space.complete, space.configs()) if first_failure(c, learnt)]
    reasons = {first_failure(c, learnt) for c in rejected}
    assert reasons
    for reason in reasons:
        assert reason.startswith("memory: predicted memory = ")
        assert "even if predictions are off by " in reason or limits is not None
    spreads = [learnt.memory_spread(space.complete(c)) for c in above]
    for own, spread in zip(above, spreads, strict=True):
        assert learnt.memory_bytes(space.complete(own)) <= limit * math.exp(spread)


def test_what_trials_say_of_memory_is_a_reading_or_a_bound():
    facts = make_facts(2.0**30, Limits(memory_utilization=0.9))
    spec = {"micro_batch_size": [1, 2, 4, 8, 16], "data_parallel": [8]}
    space = Space.from_spec(spec, facts)
    study = optuna.create_study(direction="maximize")
    told = [
        ("ok", {MEMORY: 5e8, STEP_TIME: 1.0}),
        ("oom", {}),
        ("oom", {MEMORY: 0.95 * 2**30, STEP_TIME: 2.0}),  # ended, above the limit
        ("oom", {MEMORY: 0.5 * 2**30}),  # what it had taken when it failed
        ("crash", {}),
    ]
    for size, (outcome, attributes) in zip(spec["micro_batch_size"], told, strict=True):
        distributions = {name: CategoricalDistribution(own) for name, own in spec.items()}
        study.add_trial(
            create_trial(
                params={"micro_batch_size": size, "data_parallel": 8}, distributions=distributions,
                state=TrialState.FAIL, user_attrs={OUTCOME: outcome, **attributes},
            )
        )  # fmt: skip
    found = measurements(study.trials, space)
    assert [(m.memory_bytes, m.memory_above, m.step_time_s) for m in found] == [
        (5e8, None, 1.0), (None, 2.0**30, None), (0.95 * 2**30, None, 2.0), (None, 2.0**30, None),
    ]  # fmt: skip
    held = dataclasses.replace(facts, limits=Limits(max_memory=1e9))
    assert held.memory_capacity == 1e9
    unknown = dataclasses.replace(facts, cluster=Cluster(num_devices=8), limits=Limits())
    found = measurements(study.trials, Space.from_spec(spec, unknown))
    assert [m.memory_above for m in found] == [None, 0.95 * 2**30, 0.5 * 2**30]


@pytest.mark.parametrize("sampler", ["guided", "staged"])
def test_a_resumed_study_has_learnt_the_same_from_what_ran_out_of_memory(sampler):
    report = make_report(0.95)

    def run(restarts):
        study, configs, proposer = optuna.create_study(direction="maximize"), [], None
        for number in range(8):
            if proposer is None or number in restarts:
                study.sampler = make_sampler(sampler, report, seed=2)
                proposer = Proposer(study, report, trials=20)
            proposal = proposer.ask()
            configs.append(proposal.config)
            predicted = 1.1 * report.cost.memory_bytes(report.space.complete(proposal.config))
            fits = predicted < report.cost.facts.memory_limit[0]
            value = float(proposal.config["micro_batch_size"]) if fits else None
            proposer.tell(
                proposal.number,
                "ok" if fits else "oom",
                value,
                {MEMORY: predicted} if fits else {},
            )
            proposer.add_repeat(0, number, 1.0 + 0.01 * number)
        return configs, [t.user_attrs["outcome"] for t in study.trials]

    configs, outcomes = run({4})
    assert (configs, outcomes) == run(set())
    assert "oom" in outcomes or sampler == "staged"
