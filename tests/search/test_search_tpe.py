"""Optuna's TPE for configs: what follows from the other degrees is no matter of chance."""

import optuna
import pytest

from mindtune.search.constraints import check
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.parameters import parameters
from mindtune.search.sampler import make_sampler
from mindtune.search.space import Space
from mindtune.search.study import Proposer

optuna.logging.set_verbosity(optuna.logging.ERROR)
SPEC = {
    "data_parallel": "auto", "model_parallel": [1, 2, 4, 8], "pipeline_stage": [1, 2, 4],
    "micro_batch_size": [1, 2, 4],
}  # fmt: skip


def make_report(*, allow_idle=False, **changes):
    facts = StudyFacts(
        cluster=Cluster(num_devices=64, allow_idle=allow_idle),
        training=Training(global_batch_size=256),
    )
    return check(Space.from_spec({**SPEC, **changes}, facts))


def proposed(report, *, trials, seed=0, directions=("maximize",)):
    """Return what is tried, and every trial of the study, rejected ones included."""
    study = optuna.create_study(
        directions=list(directions), sampler=make_sampler("tpe", report, seed=seed)
    )
    proposer = Proposer(study, report, trials=trials, seed=seed)
    configs = []
    while (proposal := proposer.ask()) is not None:
        configs.append(proposal.config)
        value = 1.0 / proposal.config["model_parallel"] + proposal.config["micro_batch_size"]
        several = (value, 1.0) if len(directions) > 1 else None
        proposer.tell(proposal.number, "ok", value, objectives=several)
    return configs, study.trials


@pytest.mark.parametrize("directions", [("maximize",), ("maximize", "maximize")])
def test_data_parallelism_is_what_the_devices_leave(directions):
    configs, trials = proposed(make_report(), trials=30, directions=directions)
    assert len(configs) == 30
    for trial in trials:
        config = trial.params
        assert config["data_parallel"] * config["model_parallel"] * config["pipeline_stage"] == 64
    # All 36 that fill the devices are feasible: what is turned down was proposed before.
    assert len(trials) < 60


def test_equal_seeds_propose_the_same_and_all_is_tried_in_the_end():
    report = make_report()
    first, _ = proposed(report, trials=12, seed=3)
    assert first == proposed(report, trials=12, seed=3)[0]
    assert first != proposed(report, trials=12, seed=4)[0]
    everything, _ = proposed(report, trials=99)
    assert len(everything) == report.feasible == 36


@pytest.mark.parametrize(
    "report",
    [make_report(allow_idle=True), make_report(data_parallel=4, model_parallel=[4, 8, 16])],
)
def test_where_nothing_follows_it_is_optunas_own(report):
    study = optuna.create_study(direction="maximize", sampler=make_sampler("tpe", report, seed=0))
    degrees = {study.ask(parameters(report)).params["data_parallel"] for _ in range(20)}
    assert len(degrees) > 1 or report.space.choices["data_parallel"] == (4,)
    configs, _ = proposed(report, trials=5)
    assert len(configs) == min(5, report.feasible)


def test_degrees_without_a_listed_remainder_are_drawn_all_the_same():
    report = make_report(data_parallel=[16, 64])
    configs, trials = proposed(report, trials=8)
    assert len(configs) == 8
    assert {trial.params["data_parallel"] for trial in trials} == {16, 64}


def test_a_sampler_that_is_seeded_anew_draws_everything_anew():
    """Optuna asks for it where it starts processes that share a sampler."""
    report = make_report(data_parallel=[16, 64])

    def drawn(*, anew):
        sampler = make_sampler("tpe", report, seed=0)
        if anew:
            sampler.reseed_rng()
        study = optuna.create_study(direction="maximize", sampler=sampler)
        known = {"model_parallel": 8, "pipeline_stage": 1, "micro_batch_size": 1}
        trial = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
        return [sampler._data_parallel(study, trial, known) for _ in range(40)]

    assert drawn(anew=False) == drawn(anew=False)
    assert drawn(anew=True) != drawn(anew=False)


def test_of_a_list_nothing_else_is_proposed():
    facts = StudyFacts(cluster=Cluster(num_devices=64), training=Training(global_batch_size=256))
    listed = [
        {"data_parallel": 64 // tensor, "model_parallel": tensor, "micro_batch_size": size,
         "data_workers": 1 + (tensor + size) % 3}
        for tensor in (1, 2, 4, 8) for size in (1, 2, 4)
    ]  # fmt: skip
    configs, trials = proposed(check(Space.from_spec(listed, facts)), trials=12)
    assert len(configs) == len(listed)
    # The first ones are the model's, which knows nothing of the list: a few miss it.
    assert sum(trial.params not in listed for trial in trials) <= 5
    assert len(trials) <= 20
