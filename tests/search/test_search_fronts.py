"""Studies of several objectives: proposals for the whole front."""

import math
import statistics

import numpy as np
import optuna
import pytest

from mindtune.search.attributes import VALUE
from mindtune.search.constraints import check
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.history import Attempt
from mindtune.search.parameters import parameters
from mindtune.search.sampler import make_sampler
from mindtune.search.space import Space
from mindtune.search.study import Proposer
from mindtune.search.tchebycheff import draw_weights, scalarize
from mindtune.search.trial_history import attempts

optuna.logging.set_verbosity(optuna.logging.ERROR)

SPEC = {
    "micro_batch_size": [1, 2, 4, 8, 16, 32], "env.FUSION": [0, 1, 2, 3, 4],
    "env.MODE": ["a", "b", "c"], "prefetch": [2, 4],
}  # fmt: skip
BASE = {"micro_batch_size": 1, "env.FUSION": 0, "env.MODE": "a", "prefetch": 2}
REPORT = check(
    Space.from_spec(
        SPEC,
        StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=64)),
        BASE,
    )
)


def objectives(config):
    """Return speed and stability: what makes it fast makes it unsteady, in part."""
    push = math.log2(config["micro_batch_size"]) / 5 + int(config["env.FUSION"]) / 8
    waste = {"a": 0.25, "b": 0.0, "c": 0.1}[config["env.MODE"]]
    speed = 0.1 * math.exp(push - waste)
    stability = 1.0 - 0.3 * (push / 1.5) ** 2 - 0.5 * waste - 0.02 * (config["prefetch"] == 4)
    return speed, stability


def attempt(number, *own, outcome="ok"):
    return Attempt(number, {}, outcome, None, own)


def test_each_choice_of_weights_has_its_own_best_config_of_the_front_and_no_other():
    # The third lies in a hollow of the front, which no weighted mean would choose.
    points = [(1.0, 0.1), (0.1, 1.0), (0.3, 0.28), (0.29, 0.27), (0.1, 0.1)]
    tried = [attempt(n, *point) for n, point in enumerate(points)]
    best = set()
    for share in np.linspace(0.02, 0.98, 49):
        found = scalarize(tried, (1.0, 1.0), np.array([share, 1 - share]))
        assert [a.number for a in found.tried] == list(range(5))
        values = [a.value for a in found.tried]
        best.add(int(np.argmax(values)))
        assert values[3] < values[2], "it is dominated"
        assert min(values) > 0
        assert max(values) <= 1.0
    assert best == {0, 1, 2}


def test_the_value_is_that_of_the_source_in_logarithms_and_units_of_the_front():
    tried = [attempt(0, 2.0, 0.9), attempt(1, 1.0, 0.99), attempt(2, 1.5, 0.8)]
    weights = np.array([0.25, 0.75])
    found = scalarize(tried, (1.0, 1.0), weights)
    span = np.array([math.log(2.0), math.log(0.99 / 0.9)])
    scale = weights / 0.75 * span[0] / span
    for own, point in zip(found.tried, [(2.0, 0.9), (1.0, 0.99), (1.5, 0.8)], strict=True):
        losses = scale * np.array([math.log(2.0 / point[0]), math.log(0.99 / point[1])])
        assert math.log(own.value) == pytest.approx(-losses.max() - 0.05 * losses.sum())
    assert found.speed_share == pytest.approx(1 / 3)
    # Slower and steadier is better where the first objective is a time.
    slow = scalarize([attempt(0, 0.5, 0.9), attempt(1, 1.0, 0.99)], (-1.0, 1.0), weights)
    fast = scalarize([attempt(0, 2.0, 0.9), attempt(1, 1.0, 0.99)], (1.0, 1.0), weights)
    assert [a.value for a in slow.tried] == pytest.approx([a.value for a in fast.tried])


def test_what_has_no_objectives_is_a_failure_or_no_statement():
    tried = [
        attempt(0, 1.0, 0.5), attempt(1, 1.0, 0.0), attempt(2), attempt(3, outcome="oom"),
        attempt(4, outcome="running"), attempt(5, outcome="pruned"), attempt(6, math.nan, 0.5),
    ]  # fmt: skip
    found = scalarize(tried, (1.0, 1.0), np.array([0.5, 0.5]))
    assert [a.value for a in found.tried] == [1.0, 0.0, 0.0, None, None, None, 0.0]
    nothing = scalarize(tried[3:5], (1.0, 1.0), np.array([0.5, 0.5]))
    assert [a.value for a in nothing.tried] == [None, None]


def test_a_tie_is_no_front():
    """Stability that differs by its own noise alone must not count like speed."""
    tried = [attempt(0, 2.0, 0.990), attempt(1, 1.0, 0.991)]
    found = scalarize(tried, (1.0, 1.0), np.array([0.5, 0.5]))
    lost = math.log(0.991 / 0.99) / 0.02 * math.log(2.0)
    assert math.log(found.tried[0].value) == pytest.approx(-1.05 * lost)


def test_weights_are_fixed_by_seed_and_number_and_spread_over_all_choices():
    drawn = [draw_weights(3, number, 2) for number in range(400)]
    assert all(own.sum() == pytest.approx(1.0) and (own > 0).all() for own in drawn)
    assert (draw_weights(3, 7, 2) == drawn[7]).all()
    assert (draw_weights(4, 7, 2) != drawn[7]).all()
    quarters = np.histogram([own[0] for own in drawn], bins=4, range=(0, 1))[0]
    assert quarters.min() > 70


def search(sampler, seed, *, trials=18, goal="front", restarts=()):
    """Return what a study of some trials measured, in order."""
    study = optuna.create_study(directions=["maximize"] * (2 if goal == "front" else 1))
    proposer, points = None, []
    for number in range(trials):
        if proposer is None or number in restarts:
            study.sampler = make_sampler(sampler, REPORT, seed=seed)
            proposer = Proposer(study, REPORT, trials=trials, seed=seed)
        proposal = proposer.ask()
        own = objectives(proposal.config)
        points.append(own)
        several = {"objectives": own} if goal == "front" else {}
        proposer.tell(proposal.number, "ok", own[0] * own[1], **several)
    return points


def hypervolume(points, reference=(0.07, 0.5)):
    """Return the logarithmic area that some points dominate."""
    area, height = 0.0, math.log(reference[1])
    for speed, stability in sorted(points, reverse=True):
        if math.log(stability) > height:
            area += max(0.0, math.log(speed / reference[0])) * (math.log(stability) - height)
            height = math.log(stability)
    return area


def test_proposals_cover_the_front_at_least_as_well_as_those_for_one_value():
    whole = hypervolume([objectives(entry.config) for entry in REPORT.configs])
    for_front, for_value = [], []
    for seed in range(6):
        for_front.append(hypervolume(search("guided", seed)) / whole)
        for_value.append(hypervolume(search("guided", seed, goal="value")) / whole)
    assert statistics.median(for_front) > 0.95
    assert statistics.median(for_front) >= statistics.median(for_value)


@pytest.mark.parametrize("sampler", ["guided", "staged"])
def test_a_resumed_study_of_two_objectives_goes_on_as_if_nothing_had_happened(sampler):
    first = search(sampler, 1, trials=10)
    assert first == search(sampler, 1, trials=10, restarts={4, 7})
    assert len(set(first)) == 10
    assert first != search(sampler, 2, trials=10)


def test_a_plain_optuna_study_of_two_objectives_needs_no_value_besides():
    study = optuna.create_study(directions=["minimize", "maximize"],
                                sampler=make_sampler("guided", REPORT, seed=0))  # fmt: skip

    def objective(trial):
        names = parameters(REPORT).items()
        config = {name: trial.suggest_categorical(name, own.choices) for name, own in names}
        speed, stability = objectives(config)
        return 1.0 / speed, stability

    study.optimize(objective, n_trials=5)
    assert len({str(trial.params) for trial in study.trials}) == 5
    found = attempts(study.trials, list(SPEC))
    assert [a.value for a in found] == [None] * 5
    assert all(VALUE not in trial.user_attrs for trial in study.trials)
    assert [a.objectives for a in found] == [tuple(trial.values) for trial in study.trials]
