"""Ask and tell around an Optuna study, new, resumed, and with other samplers."""

import optuna
import pytest
from optuna.trial import TrialState

from mindtune.search.attributes import MEMORY, OUTCOME, REASON, RETRY_OF, STEP_TIME
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import check
from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.model_shape import ModelShape
from mindtune.search.parameters import parameters
from mindtune.search.sampler import make_sampler
from mindtune.search.space import Space
from mindtune.search.stopping import StopRule
from mindtune.search.study import Proposer
from mindtune.search.trial_history import measurements

optuna.logging.set_verbosity(optuna.logging.ERROR)

MODEL = ModelShape(
    num_layers=4, hidden_size=128, num_heads=4, intermediate_size=512, vocab_size=256,
    seq_length=128,
)  # fmt: skip
SPEC = {
    "data_parallel": [1, 2],
    "micro_batch_size": [1, 2, 4],
    "recompute": ["none", "full"],
    "gradient_compression": ["none", "float16"],
}
BASE = {"data_parallel": 1, "micro_batch_size": 2, "recompute": "full",
        "gradient_compression": "none"}  # fmt: skip


def make_report(spec=None, base=None, *, memory=None, limits=None):
    facts = StudyFacts(
        cluster=Cluster(num_devices=2, allow_idle=True, device_memory=memory),
        training=Training(global_batch_size=8),
        model=MODEL,
        limits=limits or Limits(),
    )
    return check(Space.from_spec(spec or SPEC, facts, BASE if base is None else base))


def open_study(report, storage=None, *, sampler="guided", seed=0):
    return optuna.create_study(
        study_name="s", storage=storage, direction="maximize", load_if_exists=True,
        sampler=make_sampler(sampler, report, seed=seed),
    )  # fmt: skip


def make_proposer(report=None, storage=None, *, sampler="guided", trials=100, **options):
    report = report or make_report()
    return Proposer(open_study(report, storage, sampler=sampler), report, trials=trials, **options)


@pytest.fixture
def sqlite(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


def run_all(proposer, value=lambda config: 1.0 / config["micro_batch_size"]):
    """Ask and tell until the end; return every proposal."""
    proposals = []
    while (proposal := proposer.ask()) is not None:
        proposals.append(proposal)
        proposer.tell(proposal.number, "ok", value(proposal.config))
    return proposals


@pytest.mark.parametrize("sampler", ["guided", "random"])
def test_every_feasible_config_is_proposed_once_base_first(sampler):
    report = make_report()
    proposer = make_proposer(report, sampler=sampler)
    proposals = run_all(proposer)
    assert report.feasible == 18  # float16 needs two replicas
    assert [p.key for p in proposals if p.key in report.keys] == [p.key for p in proposals]
    assert len({p.key for p in proposals}) == len(proposals) == 18
    assert (proposals[0].number, proposals[0].config) == (0, BASE)
    assert [p.is_baseline for p in proposals] == [True] + [False] * 17
    assert proposer.stopped == "every feasible config has been tried (18)"


def test_rejected_suggestions_of_other_samplers_cost_no_trial_and_say_why():
    proposer = make_proposer(sampler="random", trials=12)
    assert len(run_all(proposer)) == 12
    assert proposer.stopped == "12 of 12 trials are done"
    rejected = [
        t for t in proposer.study.trials if t.user_attrs[OUTCOME] == "infeasible"
    ]  # fmt: skip
    assert rejected
    for trial in rejected:
        assert trial.state == TrialState.PRUNED
        assert trial.user_attrs[REASON].startswith("compression_needs_replicas: ")
        assert trial.constraints == {"compression_needs_replicas": 1.0}
    repeated = [t for t in proposer.study.trials if t.user_attrs[OUTCOME] == "duplicate"]
    assert all("same config as trial" in t.user_attrs[REASON] for t in repeated)
    assert all(t.state == TrialState.FAIL for t in repeated)


def test_our_sampler_is_never_rejected():
    proposer = make_proposer(trials=15)
    run_all(proposer)
    assert len(proposer.study.trials) == 15


def test_budgets_end_the_search_with_their_reason():
    proposer = make_proposer(trials=2, time_budget_s=60.0)
    assert proposer.ask(elapsed_s=61.0) is None
    assert proposer.stopped == "the time budget of 60 s is used up"
    for _ in range(2):
        proposer.tell(proposer.ask(elapsed_s=1.0).number, "ok", 1.0)
    assert proposer.ask(elapsed_s=2.0) is None
    assert proposer.stopped == "2 of 2 trials are done"


@pytest.mark.parametrize(
    ("outcome", "value", "state", "constraints"),
    [
        ("ok", 0.5, TrialState.COMPLETE, {}),
        ("ok", None, TrialState.FAIL, {}),
        ("ok", float("nan"), TrialState.FAIL, {}),
        ("pruned", None, TrialState.PRUNED, {}),
        ("pruned", 0.2, TrialState.PRUNED, {}),
        ("oom", None, TrialState.PRUNED, {"oom": 1.0}),
        ("timeout", None, TrialState.PRUNED, {"timeout": 1.0}),
        ("crash", None, TrialState.FAIL, {}),
        ("interrupted", None, TrialState.FAIL, {}),
    ],
)
def test_outcomes_become_states_and_constraints(outcome, value, state, constraints):
    proposer = make_proposer()
    proposal = proposer.ask()
    assert proposer.tell(proposal.number, outcome, value, {"note": "x"}) is True
    trial = proposer.study.trials[0]
    assert (trial.state, trial.constraints) == (state, constraints)
    assert trial.user_attrs[OUTCOME] == outcome
    assert trial.user_attrs["note"] == "x"
    if outcome == "pruned":
        assert trial.value == value
    assert proposer.attempts()[0].outcome == outcome


def test_a_late_report_is_no_error_and_changes_nothing():
    proposer = make_proposer()
    number = proposer.ask().number
    assert proposer.tell(number, "ok", 1.0) is True
    assert proposer.tell(number, "crash") is False
    assert proposer.study.trials[0].value == 1.0
    with pytest.raises(SearchError, match="number must be below 1, but got 5"):
        proposer.tell(5, "ok", 1.0)


def test_a_killed_study_runs_its_open_trial_again_and_nothing_that_finished(sqlite):
    first = make_proposer(storage=sqlite, trials=4)
    done = [first.ask() for _ in range(1)]
    first.tell(done[0].number, "ok", 1.0)
    lost = first.ask()
    del first  # killed in mid-trial

    second = make_proposer(storage=sqlite, trials=4)
    assert second.requeue_stale(lambda _: False) == (lost.number,)
    assert second.requeue_stale(lambda _: False) == ()
    again = second.ask()
    assert (again.key, again.retry_of) == (lost.key, lost.number)
    second.tell(again.number, "ok", 0.9)
    rest = run_all(second)
    keys = [done[0].key, again.key, *(p.key for p in rest)]
    assert len(set(keys)) == len(keys) == 4  # an interruption costs no budget
    assert second.study.trials[lost.number].user_attrs[OUTCOME] == "interrupted"
    assert second.study.trials[lost.number].state == TrialState.FAIL


def test_a_trial_that_is_alive_is_left_alone(sqlite):
    first = make_proposer(storage=sqlite)
    first.ask()
    second = make_proposer(storage=sqlite)
    assert second.requeue_stale(lambda _: True) == ()
    other = second.ask()
    assert other.number == 1  # a worker beside the first gets another config
    assert first.tell(0, "ok", 1.0) is True


def test_a_queued_config_is_not_lost_with_who_had_just_taken_it(sqlite):
    first = make_proposer(storage=sqlite)
    first.study.ask()  # killed here: the trial runs, but has no parameters yet
    second = make_proposer(storage=sqlite)
    assert second.requeue_stale(lambda _: False) == (0,)
    again = second.ask()
    assert (again.is_baseline, again.retry_of) == (True, 0)


def test_a_lost_baseline_is_measured_whatever_the_budget_says(sqlite):
    first = make_proposer(storage=sqlite, trials=2)
    lost = first.study.ask()
    for _ in range(2):
        first.tell(first.ask().number, "ok", 1.0)
    first.study.tell(lost, state=TrialState.FAIL)  # with nothing queued in its place
    second = make_proposer(storage=sqlite, trials=2)
    again = second.ask()
    assert again.is_baseline
    second.tell(again.number, "crash")
    assert second.requeue_stale(lambda _: False) == ()
    assert second.ask() is None  # what has ended by itself does not come back
    assert second.stopped == "3 of 2 trials are done"


def test_a_kill_between_queueing_and_closing_queues_once(sqlite):
    first = make_proposer(storage=sqlite)
    lost = first.ask()
    first.study.enqueue_trial(lost.config, user_attrs={RETRY_OF: lost.number})
    second = make_proposer(storage=sqlite)
    assert second.requeue_stale(lambda _: False) == (lost.number,)
    waiting = second.study.get_trials(states=(TrialState.WAITING,))
    assert [t.user_attrs for t in waiting] == [{RETRY_OF: lost.number}]


def test_a_kill_in_the_middle_of_a_report_runs_the_config_again(sqlite):
    """Attributes are stored one by one, the trial's end last: until then there is no result."""
    first = make_proposer(storage=sqlite)
    first.tell(first.ask().number, "ok", 1.0)
    lost = first.ask()
    trial = optuna.trial.Trial(first.study, first.study.trials[lost.number]._trial_id)
    for name, entry in ((MEMORY, 1e9), (STEP_TIME, 0.1), (OUTCOME, "ok")):
        trial.set_user_attr(name, entry)
    second = make_proposer(storage=sqlite)
    assert [a.outcome for a in second.attempts()] == ["ok", "running"]
    assert measurements(second.study.trials, second.report.space) == []
    assert second.requeue_stale(lambda _: False) == (lost.number,)
    retry = second.ask()
    assert (retry.config, retry.retry_of) == (lost.config, lost.number)
    second.tell(retry.number, "ok", 0.9, {MEMORY: 1e9})
    assert len(measurements(second.study.trials, second.report.space)) == 2


def test_a_config_that_keeps_dying_is_given_up_for_good(sqlite):
    report = make_report({"micro_batch_size": [1, 2, 4], "data_parallel": [1]}, base={})
    first = make_proposer(report, sqlite)
    first.tell(first.ask().number, "ok", 1.0)
    dying = first.ask()
    for attempt in range(1, 4):
        proposer = make_proposer(report, sqlite)
        assert len(proposer.requeue_stale(lambda _: False)) == 1
        waiting = proposer.study.get_trials(states=(TrialState.WAITING,))
        assert len(waiting) == (attempt < 3)
        if waiting:
            assert proposer.ask().key == dying.key
    # No sampler may propose it again.
    assert [p.key != dying.key for p in run_all(proposer)] == [True]


def test_ends_that_were_asked_for_give_no_config_up(sqlite):
    report = make_report({"micro_batch_size": [1, 2, 4], "data_parallel": [1]}, base={})
    first = make_proposer(report, sqlite)
    first.tell(first.ask().number, "ok", 1.0)
    stopped = first.ask()
    for _ in range(5):
        proposer = make_proposer(report, sqlite)
        assert len(proposer.requeue_stale(lambda _: False, on_request=True)) == 1
        assert proposer.ask().key == stopped.key
    assert sum(attempt.ended_on_request for attempt in proposer.attempts()) == 5
    # Deaths that nobody asked for still count, and only these.
    for death in range(1, 4):
        assert len(proposer.requeue_stale(lambda _: False)) == 1
        waiting = proposer.study.get_trials(states=(TrialState.WAITING,))
        assert len(waiting) == (death < 3)
        if waiting:
            assert proposer.ask().key == stopped.key
    assert [p.key != stopped.key for p in run_all(proposer)] == [True]


def test_the_baseline_is_never_given_up(sqlite):
    for _ in range(5):
        proposer = make_proposer(storage=sqlite)
        proposer.requeue_stale(lambda _: False)
        assert proposer.ask().is_baseline


def test_the_retry_of_a_finished_config_is_not_queued(sqlite):
    proposer = make_proposer(storage=sqlite)
    first = proposer.ask()
    # Two workers ran the same config; one of them was killed after the other had finished.
    proposer.study.enqueue_trial(first.config)
    twin = proposer.study.ask(parameters(proposer.report))
    proposer.tell(first.number, "ok", 1.0)
    assert proposer.requeue_stale(lambda _: False) == (twin.number,)
    assert not proposer.study.get_trials(states=(TrialState.WAITING,))
    assert proposer.ask().key != first.key


def test_running_out_of_memory_spares_the_configs_that_need_more():
    proposer = make_proposer(make_report({"micro_batch_size": [1, 2, 4, 8], "recompute": ["none"],
                                          "data_parallel": [1]}, base={}))  # fmt: skip
    assert proposer.ask().config["micro_batch_size"] == 1
    proposer.tell(0, "ok", 1.0)
    second = proposer.ask()
    proposer.tell(second.number, "oom")
    left = [p.config["micro_batch_size"] for p in run_all(proposer)]
    assert all(size < second.config["micro_batch_size"] for size in left)


def test_the_choices_of_a_study_may_not_change(sqlite):
    make_proposer(storage=sqlite)
    changed = make_report({**SPEC, "recompute": ["none", "interval:2", "full"]})
    with pytest.raises(SearchError, match="may not change within a study, but recompute differ"):
        make_proposer(changed, sqlite)
    wider = make_report({**SPEC, "comm_fusion": [0, 8]})
    with pytest.raises(SearchError, match="comm_fusion differ"):
        make_proposer(wider, sqlite)


def test_repeats_are_kept_with_the_study(sqlite):
    proposer = make_proposer(storage=sqlite)
    number = proposer.ask().number
    proposer.tell(number, "ok", 0.5)
    proposer.add_repeat(number, 2, 0.52, {"step_time_s": 0.1})
    proposer.add_repeat(number, 1, 0.48)
    proposer.add_repeat(7, 1, None, {"outcome": "crash"})
    again = make_proposer(storage=sqlite)
    assert [(r.repeat, r.value) for r in again.repeats(number)] == [(1, 0.48), (2, 0.52)]
    assert [r.number for r in again.repeats()] == [0, 0, 7]
    assert again.repeats(7)[0].attrs == {"outcome": "crash"}


def test_leaders_are_the_best_values_first():
    proposer = make_proposer(trials=6)
    run_all(proposer, lambda config: float(config["micro_batch_size"]))
    values = [leader.value for leader in proposer.leaders(3)]
    assert len(values) == 3
    assert values == sorted(values, reverse=True)


def test_measured_memory_corrects_the_rules():
    spec = {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none"], "data_parallel": [1]}
    report = make_report(spec, base={}, memory=2**30)
    assert report.feasible == 4
    proposer = make_proposer(report)
    first = proposer.ask()
    started = report.space.complete(first.config)
    proposer.tell(first.number, "ok", 1.0, {MEMORY: 0.6 * 2**30})
    second = proposer.ask()
    assert proposer.ranking.cost.memory_bytes(started) == pytest.approx(0.6 * 2**30, rel=0.05)
    assert proposer.ranking.feasible < 4
    assert proposer.ranking.cost.memory_bytes(
        report.space.complete(second.config)
    ) <= 2**30  # fmt: skip


def test_measured_step_times_correct_the_predictions_without_any_memory_limit():
    cluster = Cluster(
        num_devices=2, allow_idle=True, peak_flops=1e12, intra_node_bandwidth=1e10,
        devices_per_node=2,
    )  # fmt: skip
    facts = StudyFacts(cluster=cluster, training=Training(global_batch_size=8), model=MODEL)
    report = check(Space.from_spec(SPEC, facts, BASE))
    proposer = make_proposer(report)
    first = proposer.ask()
    started = report.space.complete(first.config)
    slow = 7 * report.cost.step_time_s(started)
    proposer.tell(first.number, "ok", 1.0, {STEP_TIME: slow})
    second = proposer.ask()
    assert proposer.ranking.cost.calibrated_by == 1
    assert proposer.ranking.cost.step_time_s(started) == pytest.approx(slow, rel=0.05)
    before = report.cost.step_time_s(report.space.complete(second.config))
    assert second.prediction.step_time_s > 3 * before


def test_the_base_config_may_lie_outside_the_users_choices_and_is_never_proposed_again():
    report = make_report(base={**BASE, "micro_batch_size": 8})
    proposer = make_proposer(report)
    proposals = run_all(proposer)
    assert proposals[0].config["micro_batch_size"] == 8
    assert all(p.config["micro_batch_size"] < 8 for p in proposals[1:])
    assert len(proposals) == 1 + report.feasible


def test_an_impossible_base_is_replaced_by_the_nearest_feasible_config():
    report = make_report(base={**BASE, "gradient_compression": "float16"})
    found = choose_baseline(report)
    assert found.rejection.startswith("compression_needs_replicas: ")
    differing = [
        n for n in BASE if found.config[n] != {**BASE, "gradient_compression": "float16"}[n]
    ]
    assert len(differing) == 1
    assert found.config in [entry.config for entry in report.configs]


def test_without_a_base_config_the_defaults_make_the_baseline():
    found = choose_baseline(make_report(base={}))
    assert found.config == {"data_parallel": 1, "micro_batch_size": 1, "recompute": "none",
                            "gradient_compression": "none"}  # fmt: skip
    assert found.rejection is None


def test_candidates_search_only_the_list():
    rows = [
        {"data_parallel": 1, "micro_batch_size": 1, "recompute": "none"},
        {"data_parallel": 2, "micro_batch_size": 4, "recompute": "full"},
        {"data_parallel": 2, "micro_batch_size": 3, "recompute": "full"},
    ]
    report = make_report(rows, base={})
    for sampler in ("guided", "random"):
        configs = [p.config for p in run_all(make_proposer(report, sampler=sampler))]
        assert len(configs) == 2
        assert all(config in rows[:2] for config in configs)


def test_an_empty_space_is_an_error_that_names_the_constraint():
    report = make_report({"data_parallel": [4, 8]}, base={})
    with pytest.raises(SearchError, match="no config of 2 is feasible: degrees_fill_cluster"):
        make_proposer(report)


def test_proposals_carry_predictions():
    report = make_report(memory=2**40)
    proposal = make_proposer(report).ask()
    assert proposal.prediction.memory_bytes > 0
    assert proposal.prediction.step_time_s is None


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsga2"])
def test_a_study_of_two_objectives_runs_with_optunas_own_samplers(sampler):
    report = make_report({**SPEC, "data_workers": [1, 2, 4, 8], "prefetch": [1, 2, 4, 8, 16, 32]})
    own = optuna.samplers.NSGAIISampler(seed=0, population_size=4) if sampler == "nsga2" else None
    own = own or make_sampler(sampler, report, seed=0)
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=own)
    stop = StopRule(min_gain=0.0)
    proposer = Proposer(study, report, trials=12, stop=stop)
    first = proposer.ask()
    proposer.tell(first.number, "oom", objectives=None)
    second = proposer.ask()
    assert proposer.tell(second.number, "pruned", 0.3, objectives=(0.6, 0.5))
    while (proposal := proposer.ask()) is not None:
        speed, steady = 1.0 / proposal.config["micro_batch_size"], 0.5
        proposer.tell(proposal.number, "ok", speed * steady, objectives=(speed, steady))
    assert proposer.stopped == "12 of 12 trials are done"
    # Ranked by their one value as ever; the front is Optuna's to show.
    ranked = [attempt for attempt in proposer.attempts() if attempt.outcome == "ok"]
    assert len(ranked) == 10
    assert all(a.value == 0.5 / a.config["micro_batch_size"] for a in ranked)
    assert proposer.leaders(1)[0].value == max(attempt.value for attempt in ranked)
    best = max(1.0 / attempt.config["micro_batch_size"] for attempt in ranked)
    assert {tuple(trial.values) for trial in study.best_trials} == {(best, 0.5)}
    assert Proposer(study, report, trials=12).ask() is None, "it can be resumed"
