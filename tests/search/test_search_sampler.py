"""The sampler: feasible, never twice, deterministic, sparing."""

import hashlib
import math
import statistics

import numpy as np
import optuna
import pytest

from mindtune.search.attributes import MEMORY
from mindtune.search.constraints import check
from mindtune.search.encoding import Encoding
from mindtune.search.errors import SearchError, SpaceExhaustedError
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.history import Attempt, infer, needs_at_least
from mindtune.search.model_shape import ModelShape
from mindtune.search.parameters import parameters
from mindtune.search.ranking import Ranking
from mindtune.search.sampler import GuidedSampler, make_sampler
from mindtune.search.space import Space
from mindtune.search.surrogate import fit, probability_ok

optuna.logging.set_verbosity(optuna.logging.ERROR)

MODEL = ModelShape(
    num_layers=4, hidden_size=128, num_heads=4, intermediate_size=512, vocab_size=256,
    seq_length=128,
)  # fmt: skip
SPEC = {
    "data_parallel": [1, 2],
    "model_parallel": [1, 2],
    "micro_batch_size": [1, 2, 4, 8, 16],
    "recompute": ["none", "interval:2", "full"],
    "gradient_compression": ["none", "float16", "topk:0.1", "topk:0.01"],
    "precision": ["float32", "float16"],
    "data_workers": [1, 2],
}
BASE = {
    "data_parallel": 1, "model_parallel": 1, "micro_batch_size": 2, "recompute": "full",
    "gradient_compression": "none", "precision": "float32", "data_workers": 1,
}  # fmt: skip


def make_report(spec=None, base=None, model=MODEL):
    facts = StudyFacts(
        cluster=Cluster(num_devices=2, device="npu", allow_idle=True),
        training=Training(global_batch_size=16),
        model=model,
    )
    return check(Space.from_spec(spec or SPEC, facts, BASE if base is None else base))


REPORT = make_report()


def step_time(config, seed):
    """Return the step time of a hidden machine that differs from the cost model by seed."""
    draw = np.random.default_rng([99, seed]).normal(size=12)
    size = config["micro_batch_size"]
    rounds = 16 / (config["data_parallel"] * size)
    repeated = {"none": 0.0, "interval:2": 0.15, "full": 0.33 + 0.08 * draw[1]}[
        config["recompute"]
    ]
    # Small micro-batches pay an overhead, large ones fall out of the cache.
    one = size * (1 + repeated) * (1.3 if size >= 8 else 1.0) + max(0.2, 1.5 + 0.5 * draw[3])
    time = 0.02 * rounds * one
    if config["model_parallel"] == 2:
        time *= 0.8 + 0.15 * draw[4]
    if config["data_parallel"] == 2:
        sent = {
            "none": 0.06,
            "float16": 0.05,
            "topk:0.1": 0.07,
            "topk:0.01": 0.05 + 0.02 * draw[8],
        }
        time = time * (1.2 + 0.2 * draw[5]) + sent[config["gradient_compression"]]
    if config["precision"] == "float16":
        time *= max(0.5, 1.6 + 0.5 * draw[9])
    text = repr((seed, sorted(config.items()))).encode()
    own = int(hashlib.sha256(text).hexdigest(), 16) % 10**6 / 10**6
    return time * (1 + 0.06 * (own - 0.5))


def search(seed, *, trials=15, noise=0.03, report=REPORT):
    """Return the regret of the best of `trials` and every proposed config."""
    sampler = GuidedSampler(report, seed=seed)
    draw = np.random.default_rng([5, seed])
    best_time = min(step_time(entry.config, seed) for entry in report.configs)
    tried = []
    for number in range(trials):
        config = dict(BASE) if number == 0 else sampler.propose(tried, number=number)
        value = math.exp(noise * draw.normal()) / step_time(config, seed)
        tried.append(Attempt(number, config, "ok", value))
    found = min(step_time(attempt.config, seed) for attempt in tried)
    return 1 - best_time / found, [attempt.config for attempt in tried]


def test_proposals_are_feasible_unique_and_deterministic():
    allowed = {tuple(entry.config.items()) for entry in REPORT.configs}
    assert (REPORT.total, REPORT.feasible) == (960, 312)
    for seed in (0, 1):
        _, first = search(seed)
        _, second = search(seed)
        assert first == second
        assert len({tuple(config.items()) for config in first}) == 15
        assert {tuple(config.items()) for config in first} <= allowed


def test_fifteen_trials_of_312_configs_find_nearly_the_best():
    regrets = [search(seed)[0] for seed in range(8)]
    assert statistics.median(regrets) <= 0.03
    assert max(regrets) <= 0.25


def test_the_model_learns_which_knob_does_nothing_and_which_does():
    encoding = Encoding({"env.A": ("x", "y"), "micro_batch_size": (1, 2, 4, 8)})
    configs = [
        {"env.A": a, "micro_batch_size": b} for a, b in [("x", 1), ("y", 1), ("x", 8), ("y", 4)]
    ]
    tried = encoding.places(configs)
    log_values = np.array([0.0, 0.0, 1.0, 0.7])
    asked = encoding.places([{"env.A": "y", "micro_batch_size": 8},
                             {"env.A": "x", "micro_batch_size": 2}])  # fmt: skip
    belief = fit(encoding, tried, log_values, np.zeros(4)).posterior(asked, np.zeros(2))
    assert belief.mean[0] == pytest.approx(1.0, abs=0.15)
    assert 0.1 < belief.mean[1] < 0.7
    assert belief.best == pytest.approx(1.0, abs=0.1)


def test_distances_follow_the_logarithm_and_the_share_of_recomputation():
    encoding = Encoding({"micro_batch_size": (1, 2, 16), "recompute": ("none", "interval:4", "full"),
                         "gradient_compression": ("none", "float16")})  # fmt: skip
    a = encoding.places([{"micro_batch_size": 1, "recompute": "none",
                          "gradient_compression": "none"}])  # fmt: skip
    b = encoding.places([{"micro_batch_size": 2, "recompute": "interval:4",
                          "gradient_compression": "float16"}])  # fmt: skip
    gaps = [gap[x, y] for gap, x, y in zip(encoding.gaps, a[0], b[0], strict=True)]
    assert gaps == [0.25, 0.25, 1.0]


def test_many_trials_and_running_ones_are_digested():
    sampler = GuidedSampler(REPORT, seed=0)
    tried = [
        Attempt(n, entry.config, "ok", 1 / step_time(entry.config, 0))
        for n, entry in enumerate(REPORT.configs[:300])
    ]
    tried += [Attempt(300, REPORT.configs[300].config, "running")]
    config = sampler.propose(tried, number=301)
    assert config in [entry.config for entry in REPORT.configs[301:]]


def test_running_trials_push_parallel_proposals_apart():
    sampler = GuidedSampler(REPORT, seed=0)
    tried = [Attempt(0, BASE, "ok", 1 / step_time(BASE, 0))]
    for number in range(1, 5):
        tried.append(Attempt(number, sampler.propose(tried, number=number), "running"))
    assert len({tuple(attempt.config.items()) for attempt in tried}) == 5


def test_values_to_minimise_lead_to_small_ones():
    sampler = GuidedSampler(REPORT, seed=0)
    tried = [Attempt(0, BASE, "ok", step_time(BASE, 0))]
    for number in range(1, 12):
        config = sampler.propose(tried, number=number, sign=-1.0)
        tried.append(Attempt(number, config, "ok", step_time(config, 0)))
    assert min(attempt.value for attempt in tried) < 0.5 * tried[0].value


def test_a_space_of_failures_is_left_after_a_few():
    spec = {"env.MODE": ["a", "b"], "env.LEVEL": list(range(20))}
    report = make_report(spec, base={})
    sampler = GuidedSampler(report, seed=0)
    tried = []
    for number in range(16):
        config = sampler.propose(tried, number=number)
        crashed = config["env.MODE"] == "a"
        tried.append(Attempt(number, config, "crash" if crashed else "ok",
                             None if crashed else 1.0 + 0.01 * int(config["env.LEVEL"])))  # fmt: skip
    assert sum(attempt.outcome == "crash" for attempt in tried) <= 4


def test_a_value_of_zero_is_a_failure_and_no_error():
    sampler = GuidedSampler(REPORT, seed=0)
    tried = [Attempt(0, BASE, "ok", 0.0), Attempt(1, REPORT.configs[0].config, "ok", 1.0)]
    assert sampler.propose(tried, number=2) is not None
    assert sampler.propose(tried[:1], number=1) is not None


def test_the_exhausted_space_is_a_typed_stop():
    spec = {"data_parallel": [1], "micro_batch_size": [1, 2]}
    report = make_report(spec, base={})
    sampler = GuidedSampler(report, seed=0)
    tried = [Attempt(n, entry.config, "ok", 1.0) for n, entry in enumerate(report.configs)]
    assert sampler.propose(tried, number=2) is None
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = parameters(report)
    for _ in range(2):
        study.tell(study.ask(distributions), 1.0)
    with pytest.raises(SpaceExhaustedError) as stop:
        study.ask(distributions)
    assert stop.value.number == 2


def test_it_is_an_ordinary_optuna_sampler():
    report = make_report()
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(report, seed=3))
    distributions = parameters(report)

    def objective(trial):
        names = distributions.items()
        config = {n: trial.suggest_categorical(n, list(d.choices)) for n, d in names}
        return 1 / step_time(config, 3)

    study.optimize(objective, n_trials=6)
    allowed = {tuple(entry.config.items()) for entry in report.configs}
    assert {tuple(trial.params.items()) for trial in study.trials} <= allowed


def test_plain_optuna_trials_that_carry_measurements_calibrate_the_cost_model():
    report = make_report()
    sampler = GuidedSampler(report, seed=3)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = parameters(report)
    for _ in range(3):
        trial = study.ask(distributions)
        memory = report.cost.memory_bytes(report.space.complete(trial.params))
        trial.set_user_attr(MEMORY, 1.5 * memory)
        study.tell(trial, 1 / step_time(trial.params, 3))
    study.ask(distributions)
    first = report.space.complete(study.trials[0].params)
    assert sampler.ranking.cost.calibrated_by == 3
    found = sampler.ranking.cost.memory_bytes(first) / report.cost.memory_bytes(first)
    assert found == pytest.approx(1.5, rel=0.15)


def test_samplers_have_names():
    for name in ("guided", "staged", "tpe", "random"):
        assert isinstance(make_sampler(name, REPORT, seed=0), optuna.samplers.BaseSampler)
    with pytest.raises(
        SearchError, match="must be one of guided, staged, tpe, random, but got 'grid'"
    ):
        make_sampler("grid", REPORT, seed=0)


OOM = {"micro_batch_size": 4, "recompute": "interval:2", "optimizer_sharding": "optimizer",
       "optimizer_offload": False, "data_parallel": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "certain"),
    [
        ({}, True),
        ({"micro_batch_size": 8}, True),
        ({"micro_batch_size": 2}, False),
        ({"recompute": "none"}, True),
        ({"recompute": "interval:4"}, True),
        ({"recompute": "full"}, False),
        ({"recompute": "selective"}, False),
        ({"optimizer_sharding": "none"}, True),
        ({"optimizer_sharding": "gradient"}, False),
        ({"optimizer_offload": True}, False),
        ({"micro_batch_size": 8, "recompute": "none", "optimizer_sharding": "none"}, True),
        ({"micro_batch_size": 8, "recompute": "full"}, False),
        ({"data_parallel": 1}, False),
        ({"data_parallel": 4}, False),
    ],
)
def test_running_out_of_memory_rules_out_what_certainly_needs_more(change, certain):
    config = {**OOM, **change}
    assert needs_at_least(config, OOM) is certain
    found = infer(config, [Attempt(7, OOM, "oom")])
    assert (found is not None) is certain
    if found and change:
        assert "trial 7 ran out of memory" in found.reason
        assert next(iter(change)) in found.reason
    for other in ("crash", "timeout", "non_finite", "bad_config", "interrupted", "pruned", "ok"):
        assert infer(config, [Attempt(7, OOM, other)]) is None


@pytest.mark.parametrize("outcome", ["timeout", "non_finite", "crash", "bad_config", "pruned"])
def test_what_fails_otherwise_is_not_tried_again_and_rules_out_nothing_else(outcome):
    report = make_report({"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"],
                          "data_parallel": [1]}, base={})  # fmt: skip
    failed = {"micro_batch_size": 1, "recompute": "full", "data_parallel": 1}
    left = Ranking(report).untried([Attempt(0, failed, outcome)])
    assert len(left) == report.feasible - 1


def test_an_offloaded_optimizer_that_fills_the_host_says_nothing_of_the_device():
    offloaded = {**OOM, "optimizer_offload": True}
    assert not needs_at_least({**offloaded, "optimizer_offload": False}, offloaded)
    assert needs_at_least({**offloaded, "micro_batch_size": 8}, offloaded)


def test_selective_recompute_orders_against_none_and_full_only():
    selective = {**OOM, "recompute": "selective"}
    assert needs_at_least({**OOM, "recompute": "none"}, selective)
    assert needs_at_least(selective, {**OOM, "recompute": "full"})
    assert not needs_at_least({**OOM, "recompute": "interval:2"}, selective)


def test_certainty_is_never_proposed():
    report = make_report({"micro_batch_size": [1, 2, 4, 8, 16], "recompute": ["none", "full"],
                          "data_parallel": [1]}, base={})  # fmt: skip
    sampler = GuidedSampler(report, seed=0)
    tried = [Attempt(0, {"micro_batch_size": 2, "recompute": "none", "data_parallel": 1}, "oom")]
    seen = []
    while (config := sampler.propose(tried, number=len(tried))) is not None:
        seen.append(config)
        tried.append(Attempt(len(tried), config, "ok", 1.0))
    assert len(seen) == 6
    assert all(c["recompute"] == "full" or c["micro_batch_size"] == 1 for c in seen)


def test_without_failures_everything_is_expected_to_run():
    encoding = Encoding({"env.A": ("x", "y")})
    points = encoding.places([{"env.A": "x"}, {"env.A": "y"}])
    assert probability_ok(encoding, points, np.array([True, True]), points).tolist() == [1.0, 1.0]
    failed = probability_ok(encoding, points, np.array([False, True]), points)
    assert failed[0] < 0.3 < failed[1]
