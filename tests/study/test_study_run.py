"""Whole studies of a tiny program, each trial a real process tree under the supervisor."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml

from mindtune.controller.errors import ConfigError, NothingFeasibleError
from mindtune.controller.trials import study_runner
from mindtune.controller.trials.export import export
from mindtune.controller.trials.process_tree import marked
from mindtune.controller.trials.progress import StudyEnded, StudyNote, StudyStarted, TrialEnded
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_runner import run_study
from mindtune.controller.trials.summary import read_summary

DRIVER = """
import sys
from pathlib import Path
from mindtune.controller.trials.study_runner import run_study
run_study(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def config_of(trial):
    return f"{trial.knobs['micro_batch_size']}-{trial.knobs['recompute']}"


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_study_with_every_kind_of_failure_finds_the_best_config(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 2, 3, 4, 8], "recompute": ["none", "full"]},
        trial={"startup_deadline": "4s", "repeats": 1},
        behaviour={
            "8-none": "oom", "2-full": "crash", "4-full": "garbage", "2-none": "hang",
            "8-full": "ignore",
        },
    )  # fmt: skip
    events = []
    result = run_study(tiny.study_file, tiny.out, on_event=events.append)
    summary = result.summary
    by_config = {config_of(trial): trial for trial in summary.trials}
    assert result.exit_code == 0
    assert {name: trial.outcome for name, trial in by_config.items()} == {
        "1-full": "ok", "1-none": "ok", "4-none": "ok", "8-none": "oom", "2-full": "crash",
        "4-full": "crash", "2-none": "timeout", "8-full": "bad_config",
    }  # fmt: skip
    assert "flux capacitor" in by_config["2-full"].message
    assert "recompute" in by_config["8-full"].message
    # Each has its own value, whatever became of the trials around it.
    values = {name: trial.measurements[0].value for name, trial in by_config.items()}
    assert values == {
        "1-full": 1.0, "1-none": pytest.approx(1.3), "4-none": pytest.approx(3.25), "8-none": None,
        "2-full": None, "4-full": None, "2-none": None, "8-full": None,
    }  # fmt: skip
    # A hung trial costs at most its deadline.
    hung = tiny.record(by_config["2-none"].number)
    assert 4.0 <= hung["wall_s"] < 6.0
    # Trial 0 is the base config, the winner is the fastest, and its value is known exactly.
    assert config_of(summary.trial(0)) == "1-full"
    winner = summary.trial(summary.winner)
    assert config_of(winner) == "4-none"
    assert winner.value == pytest.approx(13 / 4)
    assert winner.confirmed
    assert winner.measurements[0].mfu is None
    assert summary.objective == "relative"
    assert summary.complete
    # What each knob gave, over the config between them that was measured.
    assert [(list(step.changed), pytest.approx(step.ratio)) for step in summary.ablation] == [
        (["recompute"], 1.3), (["micro_batch_size"], 2.5),
    ]  # fmt: skip
    assert summary.search_ended
    assert summary.winner in summary.front
    assert (summary.noise.step, summary.noise.launch) == (0.0, None)
    assert summary.kept[0].trial == 0
    assert summary.kept[-1].trial == summary.winner
    assert summary.kept[-1].version == tiny.record(summary.winner)["config_hash"]
    # What the rules reject is told and never started.
    assert (summary.total, summary.feasible) == (10, 8)
    rejected = {rule.rule: rule.count for rule in summary.rejected if rule.count}
    assert rejected == {"micro_batch_identity": 2}
    assert "3" not in {line[2] for line in tiny.log()}
    assert sorted(line[0] for line in tiny.log() if line[1] == "0") == list("01234567")
    # The listener hears all of it, the end last.
    assert isinstance(events[0], StudyStarted)
    assert events[0].rejected[0].rule == "micro_batch_identity"
    ended = [event for event in events if isinstance(event, TrialEnded)]
    assert {event.outcome for event in ended} == {"ok", "oom", "crash", "timeout", "bad_config"}
    assert all(event.message for event in ended if event.outcome != "ok")
    assert all(event.time_left_s is not None for event in ended)
    assert isinstance(events[-1], StudyEnded)


def test_what_each_knob_gave_is_measured_on_request_and_once(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 4], "recompute": ["none", "full"]},
        study={"trials": 2},
        trial={"repeats": 2},
        behaviour={"4-full": "crash"},
    )
    plain = run_study(tiny.study_file, tiny.out).summary
    (both,) = plain.ablation
    assert (list(both.changed), both.ratio) == (["micro_batch_size", "recompute"], 3.25)
    notes = []
    summary = run_study(
        tiny.study_file, tiny.out, ablate_winner=True, on_event=notes.append
    ).summary
    first, second = summary.ablation
    # Memory knobs come in their order, but with the larger micro-batch alone it crashes.
    assert (first.changed, first.trial) == ({"recompute": ("full", "none")}, None)
    assert (first.ratio, second.ratio) == (pytest.approx(1.3), pytest.approx(2.5))
    assert second.changed == {"micro_batch_size": (1, 4)}
    assert len(summary.trials) == 2, "it is no trial of the search"
    said = [note.message for note in notes if isinstance(note, StudyNote)]
    assert any("measuring for the ablation: micro_batch_size=4" in text for text in said)
    assert any(text.startswith("left out, it ended crash") for text in said)
    launches = len(tiny.log())
    for again in (True, False):
        known = run_study(tiny.study_file, tiny.out, ablate_winner=again).summary
        assert known.ablation == summary.ablation
    assert len(tiny.log()) == launches


def test_front_of_speed_and_stability_is_searched_on_request(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 2], "recompute": ["none", "full"]},
        study={"trials": 4, "sampler": "guided"},
        score={"pareto": True},
        trial={"repeats": 1, "measure_steps": 40},
        base={"speed": {"1-none": 0.2}, "sleep": {"1-none": 0.06}},
    )
    summary = run_study(tiny.study_file, tiny.out).summary
    # The slow one may be the steady one, so none is stopped early.
    assert {trial.outcome for trial in summary.trials} == {"ok"}
    assert config_of(summary.trial(summary.winner)) == "2-none"
    assert summary.front == [summary.winner]
    study = optuna.load_study(study_name="tiny", storage=f"sqlite:///{tiny.out / 'study.db'}")
    assert len(study.directions) == 2
    (best,) = study.best_trials
    assert best.number == summary.winner
    assert best.values == [pytest.approx(1 / 0.006), 1.0]


def test_search_that_no_longer_pays_confirms_says_so_and_stays_ended(tiny):
    tiny.write(
        study={"stop": {"min_gain": 0.9, "min_trials": 3}},
        space={"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]},
        trial={"repeats": 1},
    )
    notes = []
    summary = run_study(tiny.study_file, tiny.out, on_event=notes.append).summary
    assert len(summary.trials) == 3
    assert summary.search_ended.startswith("a further trial is expected to gain")
    assert "less than stop.min_gain = 90.0%" in summary.search_ended
    said = [note.message for note in notes if isinstance(note, StudyNote)]
    assert f"the search is over: {summary.search_ended}" in said
    assert summary.complete
    assert summary.trial(summary.winner).confirmed
    launches = len(tiny.log())
    again = run_study(tiny.study_file, tiny.out).summary
    assert (again.search_ended, again.winner) == (summary.search_ended, summary.winner)
    assert len(tiny.log()) == launches


def test_killed_search_goes_on_and_repeats_nothing_that_finished(tiny, monkeypatch):
    tiny.write(trial={"repeats": 1}, study={"trials": 4})
    environment = {**os.environ, "TINY_SLEEP": "0.3"}
    search = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tiny.study_file), str(tiny.out)],
        env=environment,
        stderr=subprocess.PIPE,
    )
    try:
        wait_for(lambda: len(tiny.log()) >= 3, 60)
        with pytest.raises(ConfigError, match=f"process {search.pid} holds it"):
            run_study(tiny.study_file, tiny.out)
        interrupted = int(tiny.log()[2][-1])
        assert is_alive(interrupted)
    finally:
        search.send_signal(signal.SIGKILL)
        search.wait()
    wait_for(lambda: not is_alive(interrupted), 5)
    finished = {line[0] for line in tiny.log("end")}
    assert len(finished) == 2
    monkeypatch.setenv("TINY_SLEEP", "0.0")
    events = []
    result = run_study(tiny.study_file, tiny.out, on_event=events.append)
    assert events[0].finished == 2
    assert any("trial 2 was interrupted" in e.message for e in events if isinstance(e, StudyNote))
    starts = [line[0] for line in tiny.log() if line[1] == "0"]
    # The config that was interrupted is started again, once and under a number of its own.
    assert starts == ["0", "1", "2", "3", "4"]
    again, before = ([line[2:4] for line in tiny.log() if line[0] == n] for n in "32")
    assert again == before
    assert tiny.record(2)["outcome"] == "interrupted"
    assert [trial.number for trial in result.summary.trials] == [0, 1, 3, 4]
    assert config_of(result.summary.trial(result.summary.winner)) == "4-none"
    # A study that is complete starts nothing, and says the same.
    before = tiny.log_file.read_text()
    events.clear()
    again = run_study(tiny.study_file, tiny.out, on_event=events.append)
    assert tiny.log_file.read_text() == before
    assert again.summary == result.summary
    assert {type(event) for event in events} == {StudyStarted, StudyNote, StudyEnded}
    # What was measured may not change under it.
    tiny.write(trial={"repeats": 1, "measure_steps": 9}, study={"trials": 4})
    with pytest.raises(ConfigError, match=r"changed: trial.warmup_steps and measure_steps"):
        run_study(tiny.study_file, tiny.out)
    # More trials are no change: the study goes on.
    tiny.write(trial={"repeats": 1}, study={"trials": 5})
    assert len(run_study(tiny.study_file, tiny.out).summary.trials) == 5


def test_hopeless_trial_is_stopped_early_and_never_wins(tiny):
    tiny.write(
        space={"micro_batch_size": [2, 4], "recompute": "none"},
        trial={"measure_steps": 40, "repeats": 1},
        base={"speed": {"4-none": 0.1, "2-none": 0.2}, "sleep": {"2-none": 0.1},
              "training": {"micro_batch_size": 4, "recompute": False}},
    )  # fmt: skip
    summary = run_study(tiny.study_file, tiny.out).summary
    assert summary.trial(1).outcome == "pruned"
    assert "at best 50% of the best value" in summary.trial(1).message
    assert tiny.record(1)["wall_s"] < 3.0  # 42 steps of 0.1 s would take 4.2 s
    assert summary.trial(1).value == pytest.approx(0.5)
    # The sampler is told what could have come of it, not what its first steps came to.
    storage = f"sqlite:///{tiny.out / 'study.db'}"
    told = optuna.load_study(study_name=None, storage=storage).trials[1].value
    assert summary.trial(1).value <= told < 1.0
    # Had a worker measured it, its steps would have stayed in the worker's folder.
    (tiny.out / "trials" / "0001" / "repeat_0" / "signals.csv").unlink()
    assert run_study(tiny.study_file, tiny.out).summary.trial(1).value == pytest.approx(0.5)
    assert summary.winner == 0
    assert "no config is better than the base config" in summary.reason


def test_tie_goes_to_more_memory_to_spare_and_the_limit_is_hard(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]},
        trial={"repeats": 1},
        cluster={"device_memory": 400_000_000},
        constraints={"memory_utilization": 0.9},
        base={"speed": {"4-none": 0.005, "4-full": 0.00505, "8-full": 0.006}},
    )
    summary = run_study(tiny.study_file, tiny.out).summary
    trials = {config_of(trial): trial for trial in summary.trials}
    # The fastest needs 500 MB, more than the 360 MB that a config may use.
    assert trials["8-none"].value == pytest.approx(13 / 3)
    assert trials["8-none"].outcome == "infeasible"
    assert "peak memory 476.8 MB is above the limit of 343.3 MB" in trials["8-none"].message
    with pytest.raises(ConfigError, match="must have ended ok to be exported"):
        export(tiny.out, out=tiny.folder / "x.yaml", trial=trials["8-none"].number)
    assert not (tiny.folder / "x.yaml").exists()
    # Within 2 % of each other: the second needs 200 MB instead of 300 MB.
    leaders = [config_of(summary.trial(number)) for number in summary.leaders]
    assert leaders == ["4-none", "4-full"]
    assert config_of(summary.trial(summary.winner)) == "4-full"
    assert f"lies within 2% of trial {trials['4-none'].number}" in summary.reason


def test_nothing_better_than_the_base_means_that_the_base_wins(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 4], "recompute": "full"},
        base={"speed": {"1-full": 0.01, "4-full": 0.0099}},
    )
    result = run_study(tiny.study_file, tiny.out)
    assert result.summary.winner == 0
    assert result.summary.reason == "no config is better than the base config beyond noise"
    best = yaml.safe_load(result.best_config.read_text())
    assert best["overrides"] == {"training.micro_batch_size": 1, "training.recompute": True}


def test_leader_that_learns_worse_than_the_base_is_out(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 4], "recompute": ["none"]},
        base={"training": {"micro_batch_size": 1, "recompute": False}},
        trial={"confirm_steps": 20, "repeats": 1},
        behaviour={"4-none": "diverge"},
    )
    summary = run_study(tiny.study_file, tiny.out).summary
    leader = summary.trial(summary.leaders[0])
    assert config_of(leader) == "4-none"
    assert leader.converges is False
    assert "above the baseline's" in leader.convergence
    assert summary.winner == 0
    assert "does not converge as the base does" in summary.reason
    # The band takes three seeds of the base, each of 20 steps.
    base = [line for line in tiny.log() if line[0] == "0" and line[1] != "0"]
    assert [line[4] for line in base] == ["1", "2", "3"]
    rows = (tiny.out / "trials" / "0000" / "repeat_3" / "signals.csv").read_text().splitlines()
    assert len(rows) == 1 + 20


def test_where_no_leader_learns_as_the_base_does_the_next_takes_its_place(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 2, 4], "recompute": ["none"]},
        base={
            "training": {"micro_batch_size": 1, "recompute": False},
            "speed": {"1-none": 0.01, "2-none": 0.006, "4-none": 0.001},
        },
        trial={"confirm_steps": 20, "repeats": 2, "measure_steps": 16},
        behaviour={"4-none": "diverge"},
    )
    notes = []
    summary = run_study(tiny.study_file, tiny.out, on_event=notes.append).summary
    assert [config_of(summary.trial(number)) for number in summary.leaders] == ["4-none", "2-none"]
    assert config_of(summary.trial(summary.winner)) == "2-none"
    assert summary.reason.startswith("1.67 x the base config's value")
    assert "does not converge as the base does" in summary.reason
    said = [note.message for note in notes if "confirmed instead" in getattr(note, "message", "")]
    assert len(said) == 1
    # In turn with the base, which goes on with seeds of its own.
    second = summary.leaders[1]
    turns = [
        (int(n), int(r)) for n, r, *_ in tiny.log() if r != "0" and n != str(summary.leaders[0])
    ]
    assert turns == [(0, 1), (0, 2), (0, 3), (0, 4), (second, 1), (0, 5), (second, 2)]
    launches = len(tiny.log())
    assert run_study(tiny.study_file, tiny.out).summary.leaders == summary.leaders
    assert len(tiny.log()) == launches
    # Had the search stopped it early for the leader that is out, it could win all the same.
    path = tiny.out / "summary.json"
    path.write_text(path.read_text().replace('"outcome": "ok"', '"outcome": "pruned"'))
    best = export(tiny.out, out=tiny.folder / "best.yaml")
    assert best.overrides["training.micro_batch_size"] == 2
    with pytest.raises(ConfigError, match="must have ended ok to be exported"):
        export(tiny.out, out=tiny.folder / "x.yaml", trial=0)


def test_nothing_that_can_run_is_said_before_anything_is_written(tiny):
    tiny.write(
        space={"micro_batch_size": [3, 5], "recompute": "none"},
        base={"training": {"micro_batch_size": 3, "recompute": False}},
    )
    with pytest.raises(NothingFeasibleError, match="micro_batch_identity alone rejects all"):
        run_study(tiny.study_file, tiny.out)
    assert not tiny.out.exists()


def test_study_in_which_everything_fails_has_no_winner(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 4], "recompute": "full"},
        behaviour={"1-full": "crash", "4-full": "garbage"},
    )
    result = run_study(tiny.study_file, tiny.out)
    assert (result.exit_code, result.best_config, result.summary.winner) == (3, None, None)
    assert result.summary.complete
    with pytest.raises(ConfigError, match="must hold a config that ended ok"):
        export(tiny.out, out=tiny.folder / "best.yaml")


def test_time_budget_starts_no_further_config_but_still_confirms(tiny, monkeypatch):
    monkeypatch.setenv("TINY_SLEEP", "0.1")
    tiny.write(trial={"repeats": 1}, study={"time_budget": "1s"})
    events = []
    summary = run_study(tiny.study_file, tiny.out, on_event=events.append).summary
    assert [line[:2] for line in tiny.log()] == [["0", "0"], ["0", "1"]]
    assert summary.winner == 0
    notes = [event.message for event in events if isinstance(event, StudyNote)]
    assert notes == ["the search is over: the time budget of 1 s is used up"]


def test_a_study_ends_with_its_reason_when_no_trial_pays_any_more(tiny):
    stop = {"min_gain": 1.0, "min_trials": 2, "patience": 1}
    tiny.write(trial={"repeats": 1}, study={"sampler": "staged", "stop": stop, "trials": 6})
    events = []
    run_study(tiny.study_file, tiny.out, on_event=events.append)
    notes = [event.message for event in events if isinstance(event, StudyNote)]
    assert len({line[0] for line in tiny.log()}) == 2
    assert notes[-1].startswith("the search is over: a further trial is expected to gain ")
    assert notes[-1].endswith("less than stop.min_gain = 100.0%")


def test_base_that_crashes_once_is_measured_again(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 4], "recompute": "full"},
        trial={"repeats": 1},
        behaviour={"1-full": "crash_once"},
    )
    summary = run_study(tiny.study_file, tiny.out).summary
    assert summary.trial(0).outcome == "ok"
    assert summary.trial(0).value == 1.0
    assert [line[0] for line in tiny.log() if line[1] == "0"] == ["0", "0", "1"]


def test_processes_that_a_killed_search_left_end_before_their_trial_is_measured_again(tiny):
    tiny.write(trial={"repeats": 1}, study={"trials": 1})
    folder = tiny.out / "trials" / "0000" / "repeat_0"
    folder.mkdir(parents=True)
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "MINDTUNE_TRIAL_DIR": str(folder.resolve())},
    )
    try:
        wait_for(lambda: marked(f"MINDTUNE_TRIAL_DIR={folder.resolve()}"), 20)
        assert run_study(tiny.study_file, tiny.out).summary.winner == 0
        assert left.wait(timeout=1) == -signal.SIGTERM
    finally:
        left.kill()


def test_config_that_was_given_up_after_two_interruptions_stops_no_later_start(tiny):
    tiny.write(
        behaviour={"2-none": "end_supervisor"},
        space={"micro_batch_size": [1, 2], "recompute": ["none"]},
        base={"training": {"micro_batch_size": 1, "recompute": False}},
        trial={"repeats": 1},
    )
    summary = run_study(tiny.study_file, tiny.out).summary
    assert tiny.record(1)["outcome"] == "interrupted"
    launched = tiny.log()
    assert [line[0] for line in launched if line[1] == "0"] == ["0", "1", "1"]
    assert run_study(tiny.study_file, tiny.out).summary == summary
    assert tiny.log() == launched


def test_lost_trial_folders_come_back_from_the_storage(tiny):
    tiny.write(trial={"repeats": 1}, study={"trials": 2})
    first = run_study(tiny.study_file, tiny.out).summary
    for number in (0, 1):
        shutil.rmtree(tiny.out / "trials" / f"{number:04d}" / "repeat_0")
    launches = len(tiny.log())
    assert run_study(tiny.study_file, tiny.out).summary == first
    assert len(tiny.log()) == launches
    record = tiny.record(1)
    assert record["measured_in"].endswith(f":{tiny.out / 'trials' / '0001' / 'repeat_0'}")
    # A study of an earlier version keeps nothing but values there.
    with contextlib.closing(sqlite3.connect(tiny.out / "study.db")) as database, database:
        database.execute("DELETE FROM trial_user_attributes WHERE key = 'launch'")
    assert run_study(tiny.study_file, tiny.out).summary == first
    (tiny.out / "trials" / "0000").rename(tiny.folder / "elsewhere")
    with pytest.raises(ConfigError, match="the storage knows trials 0 of this study"):
        run_study(tiny.study_file, tiny.out)
    assert read_summary(StudyFolder(tiny.out)) == first


def test_the_winner_is_exported_before_its_ablation_is_measured(tiny, monkeypatch):
    tiny.write(trial={"repeats": 1}, study={"trials": 2})

    def end(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(study_runner, "ablate", end)
    with pytest.raises(KeyboardInterrupt):
        run_study(tiny.study_file, tiny.out, ablate_winner=True)
    assert (tiny.out / "best_config.yaml").exists()
