"""Several workers that ask the same storage at the same time."""

import contextlib
import threading
import time

import optuna
import pytest
from optuna.trial import TrialState

from mindtune.controller.trials.crew import Crew
from mindtune.controller.trials.storage import open_storage, storage_address
from mindtune.search.attributes import OUTCOME, REASON, RETRY_OF, WORKER
from mindtune.search.constraints import check
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.sampler import GuidedSampler
from mindtune.search.space import Space
from mindtune.search.study import Proposer
from mindtune.search.trial_history import attempts

optuna.logging.set_verbosity(optuna.logging.ERROR)


class AllAlive:
    def is_alive(self, trial):
        return True

    def wait(self):
        time.sleep(0.005)


def open_proposer(storage, *, worker=None, trials=100, sampler=GuidedSampler, peers=None):
    facts = StudyFacts(
        cluster=Cluster(num_devices=1, allow_idle=True),
        training=Training(global_batch_size=64),
    )
    spec = {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "interval:2", "full"]}
    report = check(Space.from_spec(spec, facts, {"micro_batch_size": 1, "recompute": "full"}))
    study = optuna.create_study(
        study_name="s", storage=open_storage(storage_address(None, storage)), direction="maximize", load_if_exists=True,
        sampler=sampler(report, seed=0),
    )  # fmt: skip
    return Proposer(study, report, trials=trials, worker=worker, peers=peers or AllAlive())


@pytest.fixture
def sqlite(tmp_path):
    return tmp_path


def run_workers(storage, count, *, trials, alone=False, at_once=None):
    """Run workers in threads; return what each has started, in order of their starts."""
    at_once = [] if at_once is None else at_once
    open_proposer(storage)
    running = set()
    started, lock, barrier = [], threading.Lock(), threading.Barrier(count)
    meeting, has_met, choices = threading.Barrier(2), threading.Event(), []

    class MeetingSampler(GuidedSampler):
        """Lets two workers choose the same before either has stored its choice, once."""

        def sample_relative(self, study, trial, search_space):
            chosen = super().sample_relative(study, trial, search_space)
            if not alone and not has_met.is_set():
                with contextlib.suppress(threading.BrokenBarrierError):
                    choices.append(chosen)
                    meeting.wait(30)
                    has_met.set()
                    meeting.abort()  # a third one need not wait for a fourth
                    return choices[0]
            return chosen

    def work(name):
        proposer = open_proposer(storage, worker=name, trials=trials, sampler=MeetingSampler)
        barrier.wait()
        while True:
            proposal = proposer.ask(alone=alone)
            if proposal is None:
                if not proposer.study.get_trials(states=(TrialState.RUNNING,)):
                    return
                time.sleep(0.01)
                continue
            with lock:
                started.append((name, proposal))
                running.add(name)
                at_once.append(len(running))
            time.sleep(0.02)
            with lock:
                running.remove(name)
            assert proposer.tell(
                proposal.number, "ok", 1.0 / proposal.number if proposal.number else 1.0
            )

    threads = [threading.Thread(target=work, args=(f"w{i}",), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return started


def test_workers_that_ask_at_once_run_no_config_twice(sqlite):
    started = run_workers(sqlite, 4, trials=9)
    keys = [proposal.key for _, proposal in started]
    # Not one more than asked for, though all see the last free place at the same time.
    assert len(set(keys)) == len(keys) == 9
    proposer = open_proposer(sqlite)
    trials = proposer.study.trials
    assert sorted(p.number for _, p in started) == [
        a.number for a in attempts(trials, proposer.report.space.knobs)
    ]
    assert all(trials[p.number].user_attrs[WORKER] == name for name, p in started)
    outcomes = [t.user_attrs.get(OUTCOME) for t in trials]
    assert set(outcomes) <= {"ok", "duplicate", "withdrawn"}
    # The workers did collide, or this shows nothing.
    assert "duplicate" in outcomes


def test_alone_means_one_trial_at_a_time(sqlite):
    at_once = []
    started = run_workers(sqlite, 3, trials=4, alone=True, at_once=at_once)
    assert len({p.key for _, p in started}) == len(started) == 4
    assert set(at_once) == {1}


def test_an_earlier_choice_still_to_come_is_waited_for_and_wins(sqlite):
    first = open_proposer(sqlite)
    early = first.study.ask()  # has its number, but no config yet
    waits = []

    class Choosing(AllAlive):
        def wait(self):
            waits.append(None)
            if len(waits) == 3:
                # What the later one has stored, the earlier one chooses as well.
                later = first.study.trials[1]
                for name, distribution in later.distributions.items():
                    first.study._storage.set_trial_param(
                        early._trial_id, name, distribution.to_internal_repr(later.params[name]),
                        distribution,
                    )  # fmt: skip

    second = open_proposer(sqlite, peers=Choosing())
    proposal = second.ask()
    assert len(waits) == 3
    assert proposal.number == 2
    assert second.study.trials[1].user_attrs[REASON] == "same config as trial 0"


def test_a_dead_worker_s_choice_is_not_waited_for(sqlite):
    open_proposer(sqlite).study.ask()

    class AllDead(AllAlive):
        def is_alive(self, trial):
            return False

    assert open_proposer(sqlite, peers=AllDead()).ask().number == 1


@pytest.mark.timeout(60)
def test_survivors_do_not_vouch_for_ever_for_who_was_killed_while_asking(sqlite):
    lost = open_proposer(sqlite).study.ask()  # the baseline; nobody knows who has it
    crews = [
        Crew(open_proposer(sqlite).study, "worker", beat_s=0.05, gone_after_s=0.5)
        for _ in range(2)
    ]
    with crews[0], crews[1]:
        proposers = [open_proposer(sqlite, peers=crew) for crew in crews]
        proposals = [proposer.ask() for proposer in proposers]
        assert len({proposal.key for proposal in proposals}) == 2
        assert proposers[0].requeue_stale(crews[0].is_alive) == (lost.number,)
        assert proposers[1].ask().is_baseline


def test_a_queued_config_is_left_to_who_takes_it_from_the_queue(sqlite):
    proposer = open_proposer(sqlite, trials=3)
    proposer.tell(proposer.ask().number, "ok", 1.0)
    lost = proposer.ask()
    number = len(proposer.study.trials)

    class QueuedMeanwhile(GuidedSampler):
        def sample_relative(self, study, trial, search_space):
            return dict(lost.config)

    # Queued after the other had looked into the queue, and before it chose the same.
    other = open_proposer(sqlite, sampler=QueuedMeanwhile)
    proposer.study.enqueue_trial(lost.config, user_attrs={RETRY_OF: lost.number})
    proposer.tell(lost.number, "interrupted")
    waiting = proposer.study.trials[number]
    trial_id = other.study._storage.create_new_trial(other.study._study_id)
    trial = optuna.Trial(other.study, trial_id)
    for name, distribution in other._parameters.items():
        trial._suggest(name, distribution)
    assert other._turned_down(trial, dict(trial.params), alone=False)
    assert (
        other.study.trials[number + 1].user_attrs[REASON]
        == f"same config as trial {waiting.number}"
    )


def test_a_trial_that_others_closed_is_not_started(sqlite):
    other = open_proposer(sqlite)

    class ClosedMeanwhile(GuidedSampler):
        closed = False

        def sample_relative(self, study, trial, search_space):
            chosen = super().sample_relative(study, trial, search_space)
            if not ClosedMeanwhile.closed:
                ClosedMeanwhile.closed = True
                assert other.requeue_stale(lambda _: False) == (trial.number,)
            return chosen

    proposer = open_proposer(sqlite, sampler=ClosedMeanwhile)
    proposer.tell(proposer.ask().number, "ok", 1.0)  # the queued baseline
    proposal = proposer.ask()
    assert proposal.number == 2
    assert proposer.study.trials[1].state == TrialState.FAIL
