"""Several processes on one study: nothing lost, nothing run twice, whoever is killed."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import optuna
import psutil
import pytest
from optuna.trial import TrialState

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials import study_opening
from mindtune.controller.trials.crew import Crew, Member
from mindtune.controller.trials.local_workers import LocalWorkers
from mindtune.controller.trials.process_tree import identify
from mindtune.controller.trials.progress import StudyNote, TrialEnded, TrialStarted
from mindtune.controller.trials.storage import open_storage, storage_address
from mindtune.controller.trials.study_opening import SearchPlan
from mindtune.controller.trials.study_runner import run_study
from mindtune.controller.trials.study_setup import load_study
from mindtune.controller.trials.trial_loop import OVER, TrialLoop
from mindtune.controller.trials.worker_runner import run_worker
from mindtune.search.attributes import OUTCOME, RETRY_OF, WORKER

SEARCH = [sys.executable, "-m", "mindtune.controller.cli", "search"]


WAITING = {
    "trial": {"repeats": 1, "startup_deadline": "120s"},
    "behaviour": {"1-full": "wait"},
}
"""Of a study whose base ends once all its workers are there."""


def workers_of(search):
    found = []
    for process in psutil.Process(search.pid).children():
        with contextlib.suppress(psutil.Error):  # it may end right now
            if "worker" in process.cmdline():
                found.append(process)
    return found


def stored(tiny, storage=None):
    if not (tiny.out / "study.db").exists():
        raise KeyError("no study yet")
    return optuna.load_study(
        storage=open_storage(storage_address(storage, tiny.out)), study_name="tiny"
    )


def test_search_with_local_workers_survives_the_kill_of_one(tiny, wait_for):
    tiny.write(**WAITING, study={"trials": 5})
    search = subprocess.Popen(
        [*SEARCH, str(tiny.study_file), "--out", str(tiny.out), "--workers", "3"],
        env={**os.environ, "TINY_SLEEP": "0.1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        tiny.let_base_end(lambda: stored(tiny), members=3)
        worker, number = wait_for(lambda: tiny.trial_below(*workers_of(search)))
        worker.kill()
        said = search.communicate(timeout=60)[1]
    finally:
        search.kill()
    assert search.returncode == 0, said
    summary = tiny.check_complete({number}, trials=5)
    assert f"trial {number} was interrupted and is started again" in said
    assert "ended with code -9" in said
    assert "measured by" in said
    trials = stored(tiny).trials
    assert trials[int(number)].user_attrs[OUTCOME] == "interrupted"
    # Two may notice the same end and queue it twice; the later copy is closed as a duplicate.
    assert {t.user_attrs[RETRY_OF] for t in trials if RETRY_OF in t.user_attrs} == {int(number)}
    assert TrialState.RUNNING not in {t.state for t in trials}
    # The confirmation is the search's own, one launch after the other.
    confirming = [line for line in tiny.log() if line[1] != "0"]
    assert len(confirming) == 1 + len(summary.leaders)
    elsewhere = [
        t for t in range(9) if (tiny.out / "workers" / "2" / "trials" / f"{t:04d}").exists()
    ]
    others = [t for t in range(9) if (tiny.out / "workers" / "3" / "trials" / f"{t:04d}").exists()]
    for folder, numbers in (("2", elsewhere), ("3", others)):
        for n in numbers:
            if str(n) != number:
                where = tiny.record(n)["measured_in"]
                assert where.endswith(f"{tiny.out}/workers/{folder}/trials/{n:04d}/repeat_0")
    # Going on measures nothing anew, and whatever was killed is forgotten.
    launches = len(tiny.log())
    assert run_study(tiny.study_file, tiny.out).summary == summary
    assert len(tiny.log()) == launches


def test_what_others_end_between_the_last_looks_is_taken_over(tiny, monkeypatch, tmp_path):
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    tiny.write(trial={"repeats": 1}, study={"trials": 3})
    before = run_study(tiny.study_file, tiny.out, storage=url).summary
    look, looks = TrialLoop._sync, []

    def see_it_late(loop, **options):
        looks.append(options)
        if len(looks) > 2:  # at the start, and before it is asked whether anything runs
            look(loop, **options)

    monkeypatch.setattr(TrialLoop, "_sync", see_it_late)
    after = run_study(tiny.study_file, tmp_path / "elsewhere", storage=url).summary
    assert [trial.number for trial in after.trials] == [trial.number for trial in before.trials]
    assert len(after.trials) == 3


def test_no_worker_is_left_where_one_cannot_be_started(tiny):
    (tiny.out / "workers").mkdir(parents=True)
    (tiny.out / "workers" / "2").touch()
    address = storage_address(None, tiny.out)
    local = LocalWorkers(tiny.write(), tiny.out / "workers", address, [{}, {}], say=print)
    with pytest.raises(FileExistsError), local:
        pass
    assert workers_of(SimpleNamespace(pid=os.getpid())) == []


def test_workers_end_with_their_search_and_the_study_goes_on_later(tiny, wait_for):
    tiny.write(**WAITING, study={"trials": 5})
    search = subprocess.Popen(
        [*SEARCH, str(tiny.study_file), "--out", str(tiny.out), "--workers", "2"],
        env={**os.environ, "TINY_SLEEP": "0.1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        tiny.let_base_end(lambda: stored(tiny), members=2)
        worker, _ = wait_for(lambda: tiny.trial_below(*workers_of(search)))
        open_now = {line[0] for line in tiny.log()} - {line[0] for line in tiny.log("end")}
    finally:
        search.kill()
        search.wait()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 10)
    assert run_study(tiny.study_file, tiny.out).exit_code == 0
    tiny.check_complete(open_now, trials=5)


def test_more_workers_than_a_machine_can_start_are_refused(tiny):
    tiny.write()
    with pytest.raises(
        ConfigError, match="--workers must be at most 64, .* but got 100000; start"
    ):
        run_study(tiny.study_file, tiny.out, workers=100_000)
    assert not tiny.out.exists()


def test_trials_side_by_side_get_devices_of_their_own(tiny, monkeypatch, tmp_path):
    tiny.write(
        **WAITING,
        study={"trials": 5, "storage": "sqlite:///shared.db"},
        cluster={"num_devices": 2, "device": "Ascend910B-A2", "allow_idle": True},
        space={"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"], "data_parallel": [1]},
    )
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="must be 1 here, since no device of Ascend910B-A2 is"):
        run_study(tiny.study_file, tiny.out, workers=2)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,4,2,0,7")
    monkeypatch.setenv("TINY_SLEEP", "0.05")
    with pytest.raises(ConfigError, match=r"--workers must be at most 2 here.*takes 2 of the 5"):
        run_study(tiny.study_file, tiny.out, workers=3)
    assert not tiny.out.exists()
    # Workers run in folders of their own: the path is that of the study file's all the same.
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tiny.folder}/shared.db"

    def study():
        return optuna.load_study(
            storage=open_storage(storage_address(url, tiny.out)), study_name="tiny"
        )

    together = threading.Thread(target=tiny.let_base_end, args=(study, 2))
    together.start()
    run_study(tiny.study_file, tiny.out, workers=2)
    together.join()
    assert (tiny.folder / "shared.db").exists()
    tiny.check_complete(set(), trials=5)
    running, seen = {}, set()
    for line in tiny.log_file.read_text().splitlines():
        kind, number, *values = line.split()
        if kind == "devices":
            assert values[0] not in running.values()
            running[number] = values[0]
            seen.add(values[0])
        elif kind == "end":
            del running[number]
    assert seen == {"0,2", "4,6"}  # in the ascending order that CANN asks for


def test_a_report_that_comes_too_late_is_dropped_and_the_study_goes_on(tiny):
    tiny.write(trial={"repeats": 1}, study={"trials": 3})
    notes = []

    def give_up(event):
        if isinstance(event, StudyNote):
            notes.append(event.message)
        if isinstance(event, TrialStarted) and event.number == 1 and event.phase == "search":
            # What others do when they have missed its signs of life for a minute.
            study = stored(tiny)
            study.enqueue_trial(dict(event.config), user_attrs={RETRY_OF: 1})
            study.tell(1, state=TrialState.FAIL)

    summary = run_study(tiny.study_file, tiny.out, on_event=give_up).summary
    assert any("trial 1 was given up by others" in note for note in notes)
    assert [trial.number for trial in summary.trials] == [0, 2, 3]
    first = [line for line in tiny.log() if line[1] == "0"]
    assert [line[0] for line in first] == ["0", "1", "2", "3"]
    assert first[1][2:4] == first[2][2:4]


@pytest.mark.parametrize("end", [KeyboardInterrupt, BrokenPipeError])
def test_a_base_that_was_interrupted_is_config_0_whoever_measures_it(tiny, end):
    tiny.write(trial={"repeats": 1}, study={"trials": 3})

    def interrupt(event):
        if isinstance(event, TrialStarted) and event.number == 0 and len(stored(tiny).trials) == 1:
            raise end

    with pytest.raises(end):
        run_study(tiny.study_file, tiny.out, on_event=interrupt)
    assert [t.state for t in stored(tiny).trials] == [TrialState.FAIL, TrialState.WAITING]
    ended = []
    summary = run_study(tiny.study_file, tiny.out, on_event=ended.append).summary
    assert [trial.number for trial in summary.trials] == [0, 2, 3]
    assert summary.trial(0).value == 1.0
    assert next(e.number for e in ended if isinstance(e, TrialEnded)) == 0


def test_a_worker_that_would_measure_something_else_is_refused(tiny, monkeypatch, tmp_path):
    tiny.write(trial={"repeats": 1}, study={"trials": 1})
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    monkeypatch.setattr(study_opening, "_JOIN_WAIT_S", 0.0)
    with pytest.raises(ConfigError, match="told where the study is stored; give --storage"):
        run_worker(tiny.study_file, tmp_path / "w")
    with pytest.raises(
        ConfigError, match="must hold a study called 'tiny' that `mindtune search`"
    ):
        run_worker(tiny.study_file, tmp_path / "w", storage=url)
    assert not (tmp_path / "shared.db").exists()
    assert not (tmp_path / "w").exists()
    with pytest.raises(ConfigError, match="must hold a study called 'tiny'"):
        run_worker(tiny.study_file, None, storage=url)
    assert not tiny.study_file.with_suffix("").exists()
    run_study(tiny.study_file, tiny.out, storage=url)
    # Equal: it finds that nothing is left to do.
    notes = []
    assert run_worker(tiny.study_file, tmp_path / "w", storage=url, on_event=notes.append) == 0
    assert notes[-1].message == "the search is over: 1 of 1 trials are done"
    # Its search was killed; what that had left of its time budget is over now.
    study = optuna.load_study(study_name="tiny", storage=url)
    plan = json.loads(study.user_attrs["search_plan"])
    late = {**plan, "trials": 5, "deadline": time.time() - 1.0}
    study.set_user_attr("search_plan", json.dumps(late))
    study.set_user_attr("search_over", "")
    assert run_worker(tiny.study_file, tmp_path / "w", storage=url, on_event=notes.append) == 0
    assert notes[-1].message == "the search is over: the time budget is used up"
    with monkeypatch.context() as other:
        other.setattr(study_opening, "describe_hardware", lambda device: "abacus")
        with pytest.raises(ConfigError, match="hardware of the search.*this machine is abacus"):
            run_worker(tiny.study_file, tmp_path / "w", storage=url)
    program = tiny.folder / "tiny_trial.py"
    program.write_text(program.read_text() + "\n")
    with pytest.raises(ConfigError, match="differ here: the program's code; copy them"):
        run_worker(tiny.study_file, tmp_path / "w", storage=url)


def test_a_second_search_of_a_study_is_refused_while_the_first_lives(tiny, tmp_path):
    tiny.write(trial={"repeats": 1}, study={"trials": 1})
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    events = []

    def search_again(event):
        events.append(event)
        if isinstance(event, TrialStarted) and event.phase == "search":
            # A process may hold its own study twice, so another one has to try.
            done = subprocess.run(
                [*SEARCH, str(tiny.study_file), "--out", str(tmp_path / "second"), "--storage", url],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            events.append((done.returncode, done.stderr))

    run_study(tiny.study_file, tiny.out, storage=url, on_event=search_again)
    code, said = next(event for event in events if isinstance(event, tuple))
    assert code == 2
    assert f"(process {os.getpid()}) does so now; join it with `mindtune worker`" in said
    assert not (tmp_path / "second").exists()
    # Once it has ended the study may be taken over, in another folder too.
    launches = len(tiny.log())
    second = run_study(tiny.study_file, tmp_path / "second", storage=url)
    assert second.exit_code == 0
    assert [line[1] for line in tiny.log()[launches:]] == ["1"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_worker_of_a_study_that_is_over_waits_for_the_search_to_go_on(tiny, monkeypatch):
    tiny.write(study={"trials": 3})
    setup, address = load_study(tiny.study_file), storage_address(None, tiny.folder)
    study = optuna.create_study(storage=open_storage(address), study_name="tiny")
    plan = {"schema": 1, "parts": {}, "trials": 2, "hardware": "", "peak_flops": None}
    study.set_user_attr(SearchPlan.FILE, json.dumps(plan))
    study.set_user_attr(OVER, "2 of 2 trials are done")

    def go_on(event):
        assert "up to 60 s for a search of study 'tiny' to go on: the last one is" in event.message
        study.set_user_attr(SearchPlan.FILE, json.dumps({**plan, "trials": 3}))
        study.set_user_attr(OVER, "")

    _, found = study_opening._wait_for_plan(setup, address, go_on)
    assert found.trials == 3
    # If none goes on, the worker joins, and learns that there is nothing to do.
    study.set_user_attr(OVER, "3 of 3 trials are done")
    monkeypatch.setattr(study_opening, "_JOIN_WAIT_S", 0.0)
    assert study_opening._wait_for_plan(setup, address, print)[1].trials == 3


def test_a_worker_goes_on_to_as_many_trials_as_the_search_plans_meanwhile(tiny, tmp_path):
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    tiny.write(trial={"repeats": 1}, study={"trials": 1})

    def leave(event):
        if isinstance(event, TrialStarted):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(tiny.study_file, tiny.out, storage=url, on_event=leave)

    def extend(event):
        if isinstance(event, StudyNote) and event.message.startswith("joined study"):
            study = stored(tiny, url)  # as a search does that is started with --trials 2
            plan = json.loads(study.user_attrs[SearchPlan.FILE])
            study.set_user_attr(SearchPlan.FILE, json.dumps({**plan, "trials": 2}))

    (tiny.out / "study.db").touch()
    assert run_worker(tiny.study_file, tmp_path / "w", storage=url, on_event=extend) == 2


def test_who_is_alive_is_told_by_change_alone():
    study = optuna.create_study()
    clock = Clock()
    crew = Crew(study, "search", clock=clock)

    def sign(beats, **changes):
        member = Member(
            id="far", role="worker", host="far", machine="other", pid=1, start_ticks=1,
            beats=beats, **changes,
        )  # fmt: skip
        study.set_user_attr("worker:far", json.dumps(member.__dict__))
        crew.look()

    def trial(number=0, **attributes):
        frozen = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        frozen.number = number
        return frozen

    assert not crew.is_alive(trial())  # of a time before there were crews
    sign(0)
    assert crew.is_alive(trial(**{WORKER: "far"}))
    assert crew.is_alive(trial())  # just asked for, by somebody
    assert not crew.is_alive(trial(**{WORKER: "nobody known"}))
    for beat in range(1, 4):  # slow, but alive: for as long as it takes
        clock.now += 59.0
        sign(beat)
        assert crew.is_alive(trial(**{WORKER: "far"}))
    clock.now += 59.0
    assert crew.is_alive(trial(**{WORKER: "far"}))
    clock.now += 1.0
    assert not crew.is_alive(trial(**{WORKER: "far"}))
    assert not crew.is_alive(trial(1))
    sign(4)  # it was only cut off
    assert crew.is_alive(trial(**{WORKER: "far"}))
    # Who asks for a trial signs it at once, or was killed: others vouch for it for a minute.
    assert not crew.is_alive(trial())
    assert crew.is_alive(trial(2))
    clock.now += 59.0
    sign(5)
    assert crew.is_alive(trial(2))
    clock.now += 1.0
    assert not crew.is_alive(trial(2))
    assert crew.is_alive(trial(2, **{WORKER: "far"}))
    sign(6, has_left=True)
    assert not crew.is_alive(trial(**{WORKER: "far"}))


def test_entries_of_other_versions_are_read_or_left_out():
    study = optuna.create_study()
    member = Member(id="new", role="worker", host="h", machine="other", pid=1, start_ticks=1)
    study.set_user_attr("worker:new", json.dumps({**member.__dict__, "mood": "fine"}))
    study.set_user_attr("worker:old", json.dumps({"id": "old"}))
    assert Crew(study, "search").others() == [member]


def test_a_member_gives_signs_of_life_whatever_it_does_and_says_when_it_leaves(wait_for):
    study = optuna.create_study()
    with Crew(study, "worker", beat_s=0.01) as crew:
        key = f"worker:{crew.me.id}"
        wait_for(lambda: json.loads(study.user_attrs[key])["beats"] > 3)  # a long measurement
        assert json.loads(study.user_attrs[key])["pid"] == os.getpid()
        other = Crew(study, "search")
        assert [member.id for member in other.others()] == [crew.me.id]
    assert other.others() == []


def test_a_member_of_this_machine_is_gone_with_its_process():
    study = optuna.create_study()
    clock = Clock()
    crew = Crew(study, "search", clock=clock)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ticks = identify(sleeper.pid).start_ticks
    member = Member(id="near", role="search", host="h", machine=crew.me.machine, pid=sleeper.pid,
                    start_ticks=ticks)  # fmt: skip
    study.set_user_attr("worker:near", json.dumps(member.__dict__))
    try:
        assert [m.id for m in crew.others()] == ["near"]
        with pytest.raises(ConfigError, match=f"h \\(process {sleeper.pid}\\) does so now"):
            crew.refuse_rivals(print)
        # Stopped, or hung: it is there, but gives no sign any more.
        clock.now += 299.0
        assert [m.id for m in crew.others()] == ["near"]
        clock.now += 1.0
        assert crew.others() == []
        study.set_user_attr("worker:near", json.dumps({**member.__dict__, "beats": 1}))
        assert [m.id for m in crew.others()] != []
    finally:
        sleeper.kill()
        sleeper.wait()
    assert crew.others() == []
    crew.refuse_rivals(print)


def test_a_rival_elsewhere_is_given_a_minute_for_a_sign_of_life():
    study = optuna.create_study()
    clock = Clock()
    crew = Crew(study, "search", clock=clock)
    said = []
    member = Member(id="far", role="search", host="far", machine="other", pid=7, start_ticks=1)

    def sign(beats):
        entry = {**member.__dict__, "beats": beats}
        study.set_user_attr("worker:far", json.dumps(entry))

    def later():
        clock.now += 25.0

    crew.wait = later
    sign(0)
    crew.refuse_rivals(said.append)
    assert said == ["far (process 7) has searched this study: waiting 60 s for a sign of life"]
    sign(1)

    def beat():
        sign(2)

    crew.wait = beat
    with pytest.raises(ConfigError, match=r"far \(process 7\) does so now"):
        crew.refuse_rivals(said.append)


def test_of_two_searches_that_start_together_one_stays():
    study = optuna.create_study()
    clock = Clock()
    crews = [Crew(study, "search", clock=clock) for _ in range(2)]
    for crew in crews:
        crew.refuse_rivals(print)  # neither sees the other yet
    low, high = sorted(crews, key=lambda crew: crew.me.id)
    with low:
        with high, pytest.raises(ConfigError, match="was started at the same moment"):
            high.refuse_late_rivals()
        low.refuse_late_rivals()

    # One that does not give way had looked before this one could be seen: it came first.
    def later():
        clock.now += 1.0

    first = [Crew(study, "search", clock=clock) for _ in range(2)]
    low, high = sorted(first, key=lambda crew: crew.me.id)
    low.wait = later
    with high:
        high.refuse_late_rivals()
        with low, pytest.raises(ConfigError, match="was started at the same moment"):
            low.refuse_late_rivals()
    assert clock.now == 5.0


def test_samplers_of_optuna_s_own_draw_anew_for_each_worker_and_each_start(tiny):
    tiny.write(study={"sampler": "random"})
    setup = load_study(tiny.study_file)
    study = optuna.create_study()
    seeds = {
        study_opening._seed(study, setup),
        study_opening._seed(study, setup, worker="a"),
        study_opening._seed(study, setup, worker="b"),
    }
    assert study_opening._seed(study, setup) == setup.study.study.seed
    study.enqueue_trial({})
    seeds |= {study_opening._seed(study, setup), study_opening._seed(study, setup, worker="a")}
    assert len(seeds) == 5
    tiny.write(study={"sampler": "guided"})
    guided = load_study(tiny.study_file)
    assert study_opening._seed(study, guided, worker="a") == guided.study.study.seed
