"""When a state is copied, proved, dropped and returned to; no framework is loaded."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.settings import LiveConfig, RewindSection, load_settings
from mindtune.controller.live.snapshots import PROVED_AFTER, Snapshots


class Weights:
    """The state of a run, a number, and its copies."""

    def __init__(self, *, survives=False):
        self.survives = survives
        self.value = 0
        self.copies = {}
        self.most = 0
        self.fails = False

    def write(self, step):
        if self.fails:
            raise ConfigError("the disk is full")
        self.copies[step] = self.value
        self.most = max(self.most, len(self.copies))

    def load(self, step):
        if step not in self.copies:
            raise ConfigError(f"step {step} is damaged")
        return self.copies[step]

    def assign(self, copy):
        self.value = copy

    def holds(self, step):
        return step in self.copies

    def retain(self, steps):
        self.copies = {step: copy for step, copy in self.copies.items() if step in steps}


class Run:
    """Steps whose weights are their own number."""

    def __init__(self, *, every=10, keep=2, survives=False, weights=None, **options):
        self.weights = weights or Weights(survives=survives)
        self.snapshots = Snapshots(self.weights, every=every, keep=keep, **options)
        self.step = 0

    def begin(self, step=0, saved=None):
        self.step = step
        self.snapshots.begin(step, saved=saved)
        return self

    def train(self, steps, *, healthy=True):
        taken = []
        for _ in range(steps):
            self.step += 1
            self.weights.value = self.step
            if self.snapshots.note(self.step, healthy=healthy):
                taken.append(self.step)
        return taken


def test_the_start_needs_no_judgement():
    run = Run().begin()
    assert run.snapshots.healthy == (0,)
    run.train(5, healthy=False)
    assert run.snapshots.rewind() == 0
    assert run.weights.value == 0


def test_a_copy_is_taken_every_so_many_healthy_steps():
    run = Run(every=10).begin()
    assert run.train(35) == [10, 20, 30]
    run.train(20, healthy=False)
    # Of the ten healthy steps after step 30, five had passed.
    assert run.train(10) == [60]


def test_a_copy_counts_once_enough_healthy_steps_were_made_with_it():
    run = Run(every=10).begin()
    run.train(10 + PROVED_AFTER - 1)
    assert run.snapshots.healthy == (0,)
    run.train(1)
    assert run.snapshots.healthy == (0, 10)


def test_a_copy_after_which_things_go_wrong_is_never_returned_to():
    run = Run(every=10).begin()
    run.train(10 + PROVED_AFTER - 1)
    run.train(1, healthy=False)
    assert run.snapshots.rewind() == 0
    # It stays out of use however healthy the steps after it are.
    run.train(9)
    assert run.snapshots.healthy == (0,)


def test_the_newest_healthy_copy_is_never_pruned():
    run = Run(every=10, keep=2).begin()
    run.train(10 + PROVED_AFTER)
    for _ in range(6):
        # Every later copy goes bad before it is proved.
        while not run.train(1):
            pass
        run.train(PROVED_AFTER - 1)
        run.train(3, healthy=False)
    assert run.snapshots.healthy == (10,)
    assert run.snapshots.rewind() == 10
    assert run.weights.value == 10


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_never_more_copies_than_asked_for(keep):
    run = Run(every=8, keep=keep).begin()
    for _ in range(20):
        run.train(17)
        run.train(2, healthy=False)
    assert run.weights.most == keep


def test_a_return_goes_to_the_newest_and_can_be_repeated():
    run = Run(every=10, keep=3).begin()
    run.train(38)
    assert run.snapshots.healthy == (10, 20, 30)
    run.train(3, healthy=False)
    assert (run.snapshots.rewind(), run.weights.value) == (30, 30)
    run.train(3, healthy=False)
    assert (run.snapshots.rewind(), run.weights.value) == (30, 30)
    # Ten healthy steps from the return on until the next copy; steps go on rising.
    assert run.train(10) == [54]


def test_a_return_drops_the_copy_on_the_way_that_is_left():
    run = Run(every=10).begin()
    run.train(23)
    assert run.snapshots.rewind() == 10
    run.train(PROVED_AFTER)
    assert run.snapshots.healthy[-1] == 10


def test_a_copy_that_cannot_be_written_costs_no_run(caplog):
    run = Run(every=10).begin()
    run.weights.fails = True
    assert run.train(25) == []
    assert "no state of step 10 is kept: the disk is full" in caplog.text
    run.weights.fails = False
    assert run.train(5) == [30]
    assert run.snapshots.rewind() == 0


def test_without_any_state_a_return_is_refused_and_changes_nothing():
    run = Run()
    run.weights.fails = True
    run.begin().train(5)
    with pytest.raises(ConfigError, match="no earlier state could be kept"):
        run.snapshots.rewind()
    assert run.weights.value == 5


def test_a_damaged_copy_is_passed_over_for_an_older_one(caplog):
    run = Run(every=10, keep=3).begin()
    run.train(38)
    del run.weights.copies[30]
    assert run.snapshots.rewind() == 20
    assert "step 30 is damaged" in caplog.text
    run.weights.copies.clear()
    with pytest.raises(ConfigError, match="step 10 is damaged"):
        run.snapshots.rewind()


class Job:
    """Ranks in threads of one process, which meet at every question."""

    def __init__(self, size):
        self.meeting = threading.Barrier(size, timeout=10)
        self.told = [None] * size
        self.asked = 0

    def of_all_ranks(self, rank):
        def tell(number):
            self.told[rank] = number
            self.meeting.wait()
            everyone = tuple(self.told)
            self.meeting.wait()
            self.asked += rank == 0
            return everyone

        return tell

    def rewind(self, runs):
        def outcome(run):
            try:
                return run.snapshots.rewind()
            except ConfigError as error:
                return str(error)

        with ThreadPoolExecutor(len(runs)) as ranks:
            return list(ranks.map(outcome, runs))


@pytest.mark.parametrize(
    ("damaged", "returned", "asked"),
    [
        ([(), ()], 30, 1),
        ([(), (30,)], 20, 2),
        ([(30,), (20,)], 10, 3),
        ([(30, 20), (), (30,)], 10, 2),
        # They have no state in common, or a rank has none at all.
        ([(30, 10), (20,)], None, 4),
        ([(30, 20, 10), ()], None, 2),
    ],
)
def test_ranks_return_to_the_newest_state_that_all_can_read(damaged, returned, asked):
    job = Job(len(damaged))
    runs = [
        Run(every=10, keep=4, of_all_ranks=job.of_all_ranks(rank)).begin()
        for rank in range(len(damaged))
    ]
    for run, steps in zip(runs, damaged, strict=True):
        run.train(38)
        run.weights.copies.pop(0, None)
        for step in steps:
            del run.weights.copies[step]
    outcomes = job.rewind(runs)
    assert job.asked == asked
    if returned is None:
        told = ["no earlier state in common", "is damaged"]
        assert all(any(text in outcome for text in told) for outcome in outcomes)
        assert [run.weights.value for run in runs] == [38] * len(runs)
        return
    assert outcomes == [returned] * len(runs)
    for run in runs:
        assert run.weights.value == returned
        # What a rank cannot read is not kept in place of what all can.
        assert run.snapshots.healthy[-1] == returned


def test_a_state_that_cannot_be_read_takes_no_place_of_one_that_can():
    run = Run(every=10, keep=3).begin()
    run.train(38)
    del run.weights.copies[30]
    assert run.snapshots.rewind() == 20
    run.train(10 + 1)
    assert run.snapshots.rewind() == 20


def test_copies_on_disk_are_found_again_and_the_next_is_taken_at_the_same_step():
    straight = Run(every=10, survives=True).begin()
    straight.train(24)
    state = json.loads(json.dumps(straight.snapshots.state()))
    resumed = Run(every=10, survives=True, weights=straight.weights).begin(24, state)
    assert resumed.snapshots.healthy == (10,)
    assert resumed.train(26) == [30, 40, 50]
    assert resumed.snapshots.healthy == (40,)


def test_a_saved_list_keeps_its_copies_until_the_next_one():
    run = Run(every=10, survives=True).begin()
    run.train(24)
    state = run.snapshots.state()
    run.train(40)
    again = Run(every=10, survives=True, weights=run.weights).begin(24, state)
    assert again.snapshots.healthy == (10,)
    assert again.snapshots.rewind() == 10
    run.snapshots.state()
    run.train(10)
    assert 10 not in run.weights.copies


def test_what_is_no_longer_there_is_said_and_taken_anew(caplog):
    run = Run(survives=True)
    run.begin(24, {"healthy": [10, 20], "unproved": 23, "healthy_steps": 3})
    assert "earlier states of step 10, 20 are no longer there" in caplog.text
    assert run.snapshots.healthy == (24,)
    caplog.clear()
    other = Run(survives=True)
    other.begin(24, {"taken": 3})
    assert "cannot be read" in caplog.text
    assert other.snapshots.healthy == (24,)


def test_copies_in_memory_end_with_the_process():
    run = Run().begin()
    run.train(24)
    assert run.snapshots.state() is None
    assert Run().begin(24, None).snapshots.healthy == (24,)


def test_the_section_has_bounds_and_reaches_the_settings():
    section = RewindSection()
    assert (section.enabled, section.every, section.keep) == (True, 20, 2)
    assert (section.storage, section.max_memory) == ("memory", 4 * 2**30)
    told = {"rewind": {"every": 8, "keep": 3, "storage": "disk", "max_memory": "1GB"}}
    assert load_settings(told, {}).rewind == RewindSection(
        every=8, keep=3, storage="disk", max_memory=2**30
    )
    for wrong in ({"every": 7}, {"keep": 1}, {"keep": 17}, {"storage": "tape"}, {"each": 3}):
        with pytest.raises(ConfigError):
            load_settings({"rewind": wrong}, {})
    assert LiveConfig().rewind == section
