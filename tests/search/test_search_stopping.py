"""When a search has found enough: the rule alone, and in a study."""

import math

import optuna
import pytest

from mindtune.search import prospects as prospects_module
from mindtune.search.attributes import GAIN, WALL
from mindtune.search.constraints import check
from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.ranking import Ranking
from mindtune.search.sampler import make_sampler
from mindtune.search.space import Space
from mindtune.search.stopping import Outlook, StopRule, reason_to_stop
from mindtune.search.study import Proposer

optuna.logging.set_verbosity(optuna.logging.ERROR)

REPORT = check(
    Space.from_spec(
        {
            "micro_batch_size": [1, 2, 4, 8, 16, 32],
            "env.MODE": ["a", "b"],
            "data_workers": [1, 2, 4],
        },
        StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=32)),
    )
)


def outlook(*gains, num_trials=10, num_knobs=4, trial_s=100.0):
    return Outlook(gains=gains, num_trials=num_trials, num_knobs=num_knobs, trial_s=trial_s)


TWICE = "; none paid after any of the last 2 results"


@pytest.mark.parametrize(
    ("rule", "seen", "reason"),
    [
        (StopRule(patience=2), outlook(0.01, 0.03), None),
        (StopRule(patience=2), outlook(0.03, 0.01), None),
        (StopRule(patience=2), outlook(0.01), None),
        (StopRule(patience=2), outlook(0.9, 0.0, 0.01), ("a further trial is expected to gain 1.0%, "
         "less than stop.min_gain = 2.0%" + TWICE)),
        (StopRule(), outlook(0.0, 0.0), None),
        (StopRule(), outlook(0.0, 0.0, 0.0), ("a further trial is expected to gain 0.0%, less than "
         "stop.min_gain = 2.0%; none paid after any of the last 3 results")),
        # Of ln 2 the best takes twice as long as what is expected: half of the time is saved.
        (StopRule(patience=1, min_gain=0.6), outlook(math.log(2.0)),
         "a further trial is expected to gain 50.0%, less than stop.min_gain = 60.0%"),
        (StopRule(patience=2), outlook(0.0, 0.0, num_trials=7), None),
        (StopRule(patience=2), outlook(0.0, 0.0, num_knobs=10), None),
        (StopRule(patience=2), outlook(0.0, 0.0, num_trials=11, num_knobs=10),
         "a further trial is expected to gain 0.0%, less than stop.min_gain = 2.0%" + TWICE),
        (StopRule(patience=2, min_trials=2), outlook(0.0, 0.0, num_trials=2, num_knobs=10),
         "a further trial is expected to gain 0.0%, less than stop.min_gain = 2.0%" + TWICE),
        (StopRule(patience=2, min_gain=0.0), outlook(1e-9, 1e-9), None),
        (StopRule(patience=2, training_s=1e4), outlook(0.03, 0.03), None),
        (StopRule(patience=2, training_s=1e3), outlook(0.01, 0.03), ("a further trial is expected to "
         "gain 3.0%, 30 s of stop.training_time = 1000 s, but takes 100 s" + TWICE)),
        (StopRule(patience=2, training_s=1e3), outlook(0.03, 0.03, trial_s=None), None),
        (StopRule(patience=2, training_s=1e3), outlook(0.01, 0.5), None),
    ],
)  # fmt: skip
def test_a_search_stops_when_no_trial_pays_any_more(rule, seen, reason):
    assert reason_to_stop(rule, seen) == reason


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_gain": -0.1}, "stop.min_gain must be in"),
        ({"min_gain": math.nan}, "stop.min_gain must be in"),
        ({"min_trials": 0}, "stop.min_trials must be at least 1, but got 0"),
        ({"patience": 0}, "stop.patience must be at least 1, but got 0"),
        ({"training_s": 0.0}, "stop.training_time must be above 0, but got 0"),
    ],
)
def test_limits_without_sense_are_refused(wrong, words):
    with pytest.raises(SearchError, match=words):
        StopRule(**wrong)


def run(stop, value, *, trials=36, sampler="guided", wall_s=60.0, restarts=False):
    """Return the proposals' configs and why the search ended."""

    def resumed():
        study.sampler = make_sampler(sampler, REPORT, seed=0)
        return Proposer(study, REPORT, trials=trials, stop=stop)

    study = optuna.create_study(direction="maximize")
    proposer = resumed()
    configs = []
    while (proposal := proposer.ask()) is not None:
        configs.append(proposal.config)
        found = value(proposal.config)
        outcome = "crash" if found is None else "ok"
        proposer.tell(proposal.number, outcome, found, {WALL: wall_s})
        proposer = resumed() if restarts else proposer
    return configs, proposer.stopped


def larger_is_faster(config):
    return float(config["micro_batch_size"]) ** 0.5


def test_without_a_rule_all_trials_are_made():
    configs, stopped = run(None, larger_is_faster)
    assert (len(configs), stopped) == (36, "36 of 36 trials are done")


@pytest.mark.parametrize("sampler", ["guided", "staged", "random"])
def test_a_study_ends_once_the_model_expects_nothing_more(sampler):
    configs, stopped = run(StopRule(), larger_is_faster, sampler=sampler)
    assert 8 <= len(configs) < 36
    assert "less than stop.min_gain = 2.0%; none paid after any of the last 3 results" in stopped
    if sampler == "guided":
        assert max(config["micro_batch_size"] for config in configs) == 32


def test_a_resumed_study_keeps_its_patience():
    assert run(StopRule(), larger_is_faster, restarts=True) == run(StopRule(), larger_is_faster)


def test_more_patience_and_more_knobs_mean_no_fewer_trials():
    counts = [
        len(run(StopRule(min_trials=2, patience=patience), larger_is_faster)[0])
        for patience in (1, 3, 6)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    least, _ = run(StopRule(min_trials=20), larger_is_faster)
    assert len(least) >= 20


def test_asks_without_a_new_result_are_one_look():
    study = optuna.create_study(
        direction="maximize", sampler=make_sampler("guided", REPORT, seed=0)
    )
    proposer = Proposer(study, REPORT, trials=36, stop=StopRule(min_trials=2, patience=3))
    for _ in range(2):
        first = proposer.ask()
        proposer.tell(first.number, "ok", larger_is_faster(first.config))
    running = [proposer.ask() for _ in range(6)]
    assert None not in running, "six workers that ask at once have learnt nothing six times"
    looks = [study.trials[proposal.number].user_attrs[GAIN] for proposal in running]
    assert [known for _, known in looks] == [2] * 6


@pytest.mark.parametrize("sampler", ["guided", "staged"])
def test_what_is_judged_is_what_is_proposed_by_one_fit(sampler, monkeypatch):
    fits, rankings = [], []
    fit, build = prospects_module.fit, Ranking.__init__

    def fitted(*args, **options):
        fits.append(args)
        return fit(*args, **options)

    def built(self, report):
        rankings.append(report)
        build(self, report)

    monkeypatch.setattr(Ranking, "__init__", built)
    study = optuna.create_study(
        direction="maximize", sampler=make_sampler(sampler, REPORT, seed=0)
    )
    proposer = Proposer(study, REPORT, trials=36, stop=StopRule(min_trials=36))
    assert len(rankings) == 1
    monkeypatch.setattr(prospects_module, "fit", fitted)
    for number in range(5):
        tried = proposer.attempts()
        proposal = proposer.ask()
        assert len(fits) == max(0, number)
        proposer.tell(proposal.number, "ok", larger_is_faster(proposal.config))
        if number:
            again = make_sampler(sampler, REPORT, seed=0).suggest(tried, number=number)
            fits.pop()
            assert again.config == proposal.config
            gain, known = study.trials[number].user_attrs[GAIN]
            assert (gain, known) == (pytest.approx(again.gain), number)


def test_a_short_training_is_not_worth_a_long_trial():
    often, _ = run(StopRule(min_gain=0.0, min_trials=2, training_s=1e6), larger_is_faster)
    rarely, stopped = run(StopRule(min_gain=0.0, min_trials=2, training_s=100.0), larger_is_faster)
    assert len(rarely) < len(often)
    assert "s of stop.training_time = 100 s, but takes 60 s; none paid" in stopped


def test_nothing_is_known_while_everything_fails():
    configs, stopped = run(StopRule(min_trials=1), lambda _config: None, trials=12)
    assert (len(configs), stopped) == (12, "12 of 12 trials are done")
