"""Nothing of a trial outlives its end, its deadline or its parent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindtune.controller.contract import TrialRecord, read_document
from mindtune.controller.trials import launcher, supervisor
from mindtune.controller.trials.launcher import launch
from mindtune.controller.trials.outcome import judge
from mindtune.controller.trials.process_tree import descendants, marked
from mindtune.controller.trials.protocol import SupervisorReport, SupervisorSpec
from mindtune.controller.trials.supervisor import _Supervision

CHILDREN = """
import os, subprocess, sys, time
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
def note(pid):
    with open("pids", "a") as file:
        file.write(f"{pid}\\n")
def grandchild_in_a_session():
    note(subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True).pid)
def daemon(environment=os.environ):
    \"\"\"Fork twice, so that the parent is gone and the process is nobody's child.\"\"\"
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(os.getpid())
            os.execve(sys.executable, [sys.executable, "-c", SLEEP], environment)
        os._exit(0)
    os.wait()
def settled(number):
    while not os.path.exists("pids") or len(open("pids").read().split()) < number:
        time.sleep(0.02)
"""


def recorded(folder):
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(fact, limit_s):
    end = time.monotonic() + limit_s
    while not fact() and time.monotonic() < end:
        time.sleep(0.05)
    return fact()


def test_a_host_that_hears_nothing_more_takes_the_launcher_for_gone(tmp_path, monkeypatch):
    spec = SupervisorSpec(
        command=[], trial_dir=str(tmp_path), environment={}, mark="A=1", parent_pid=None,
        startup_deadline_s=600.0, deadline_s=600.0, silence_limit_s=300.0,
    )  # fmt: skip
    now = [0.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    supervision = _Supervision(spec)

    def is_gone(at, words=b""):
        now[0] = at
        os.write(launcher_end, words)
        return supervision.parent_is_gone()

    own = os.dup(0)
    pipe, launcher_end = os.pipe()
    try:
        os.dup2(pipe, 0)
        assert not is_gone(299.0)
        assert not is_gone(301.0, b"\n")  # a sign of life, and no order
        assert supervision.ordered is None
        assert not is_gone(600.0, b"stop\n")
        assert supervision.ordered == "stop"
        assert not is_gone(899.0)
        assert is_gone(900.0)
    finally:
        os.dup2(own, 0)
        for end in (own, pipe, launcher_end):
            os.close(end)


def test_failed_results_of_earlier_segments_end_no_run_that_goes_on(tmp_path):
    spec = SupervisorSpec(
        command=[], trial_dir=str(tmp_path), environment={}, mark="A=1", parent_pid=1,
        startup_deadline_s=1.0, deadline_s=1.0,
    )  # fmt: skip
    supervision = _Supervision(spec)
    for name in ("result.segment_1.json", "result.unreadable.json"):
        (tmp_path / name).write_text('{"outcome": "crash"}')
    assert not supervision.has_failure()
    # Whoever was stopped by a policy may save for minutes.
    (tmp_path / "result.json").write_text('{"outcome": "stopped"}')
    assert not supervision.has_failure()
    (tmp_path / "result.rank1.json").write_text('{"outcome": "crash"}')
    assert supervision.has_failure()


def test_what_became_of_a_slurm_job_is_read_from_this_launch_alone(tmp_path):
    line = "slurmstepd: error: *** STEP 7.0 ON n CANCELLED AT 2026-11-30T10:00:00 ***"
    (tmp_path / "stderr.log").write_text(f"{line}\n")  # the first attempt's
    spec = SupervisorSpec(
        command=[], trial_dir=str(tmp_path), environment={}, mark="A=1", parent_pid=1,
        startup_deadline_s=1.0, deadline_s=1.0, rank_dir=str(tmp_path / "ranks"), num_ranks=2,
        job_name="mindtune_1",
    )  # fmt: skip
    supervision = _Supervision(spec)
    assert supervision._cancellation() == ""
    with (tmp_path / "stderr.log").open("a") as log:
        log.write(f"srun: Force Terminated job 7\n{line}\n")
    assert supervision._cancellation() == line
    # srun that died, or failed, says nothing of the job; all ranks together do.
    for exits, is_over in (
        ({"command": -9}, False),
        ({"command": 0}, True),
        ({"rank0": 1, "command": 1}, False),
        ({"rank0": 0, "rank1": 1}, True),
    ):
        supervision.exits = exits
        assert supervision._job_is_over() is is_over


def test_ranks_of_several_nodes_are_ordered_by_a_clock_that_they_share(tmp_path):
    before = time.time()
    wrapper = [sys.executable, "-m", "mindtune.controller.trials.rank_process", str(tmp_path)]
    subprocess.run([*wrapper, sys.executable, "-c", "pass"], check=True)
    record = json.loads((tmp_path / "exit.rank0.json").read_text())
    assert before <= record["ended_at"] <= time.time()


@pytest.mark.parametrize(
    ("start", "number"),
    [
        ("grandchild_in_a_session()", 1),
        ("daemon()", 1),
        ("daemon(environment={})", 1),
        ("grandchild_in_a_session(); daemon(); daemon(environment={})", 3),
    ],
)
def test_what_the_command_left_behind_ends_with_it(program, start, number):
    report = program.launch(CHILDREN + f"{start}; settled({number})")
    assert report.supervised.ended_by == "exit"
    assert report.supervised.processes_left == 0
    pids = recorded(program.trial_dir)
    assert len(pids) == number
    assert not any(is_alive(pid) for pid in pids)
    assert report.supervised.wall_s < 6.0


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(program):
    report = program.launch(
        CHILDREN + "grandchild_in_a_session(); settled(1); exec(SLEEP)",
        startup_deadline_s=1.0,
        stop_grace_s=1.5,
    )
    assert report.supervised.ended_by == "startup_deadline"
    assert report.supervised.exit_codes == {"command": -signal.SIGKILL}
    assert 2.5 <= report.supervised.wall_s < 6.0
    assert not any(is_alive(pid) for pid in recorded(program.trial_dir))


def test_a_command_may_clean_up_within_the_grace(program):
    program.launch(
        """
        import signal, sys, time
        def leave(*_):
            time.sleep(0.5)
            open("cleaned", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        time.sleep(60)
        """,
        startup_deadline_s=1.0,
    )
    assert (program.trial_dir / "cleaned").exists()


PARENT = """
import pathlib, sys
from mindtune.controller.trials import launcher, supervisor
from mindtune.controller.trials.launcher import launch
try:
    launch([sys.executable, sys.argv[1]], trial_dir=pathlib.Path(sys.argv[2]),
           startup_deadline_s=float(sys.argv[3]), deadline_s=60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
ENDLESS = (
    CHILDREN
    + """
note(os.getpid()); note(os.getppid())
grandchild_in_a_session(); daemon(); daemon(environment={}); settled(5)
open("ready", "w").close()
exec(SLEEP)
"""
)


@contextlib.contextmanager
def study_process(program, *, startup_deadline_s=60):
    """Start a process that runs an endless trial with children; yield it once all are there."""
    program.script.write_text(ENDLESS)
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, program.script, program.trial_dir, str(startup_deadline_s)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert wait_until((program.trial_dir / "ready").exists, 30)
            yield process
        finally:
            process.kill()


def all_ended(program):
    """Tell whether the five recorded processes, the supervisor among them, are gone."""
    pids = recorded(program.trial_dir)
    assert len(pids) == 5
    entry = f"MINDTUNE_TRIAL_DIR={program.trial_dir}"
    return not any(is_alive(pid) for pid in pids) and not marked(entry)


def test_sigkill_of_the_study_leaves_nothing_after_five_seconds(program):
    with study_process(program) as study:
        assert not all_ended(program)
        study.kill()
        study.wait()
        assert wait_until(lambda: all_ended(program), 5.0)
    record = read_document(TrialRecord, program.trial_dir / "trial.json")
    assert record.outcome == "interrupted"


def test_sigkill_of_the_study_during_an_ordinary_stop_leaves_nothing_either(program):
    with study_process(program, startup_deadline_s=4) as study:
        time.sleep(4.5)
        # The stop has begun, and its grace of 10 s goes on for those that ignore SIGTERM.
        assert not all_ended(program)
        study.kill()
        study.wait()
        assert wait_until(lambda: all_ended(program), 5.0)


def test_ctrl_c_ends_the_trial_before_it_is_passed_on(program):
    with study_process(program) as study:
        os.killpg(study.pid, signal.SIGINT)
        assert study.stdout.readline() == "interrupted\n"
        assert all_ended(program)
    assert read_document(TrialRecord, program.trial_dir / "trial.json").outcome == "interrupted"


def test_sigkill_of_the_study_and_of_the_supervisor_together_ends_the_command(program):
    with study_process(program) as study:
        command, supervisor = recorded(program.trial_dir)[:2]
        try:
            os.kill(supervisor, signal.SIGKILL)
            study.kill()
            study.wait()
            assert wait_until(lambda: not is_alive(command), 5.0)
        finally:
            for pid in recorded(program.trial_dir):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def launch_in_thread(program, source):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(program.launch(source)))
    thread.start()
    assert wait_until((program.trial_dir / "ready").exists, 20)
    return thread, reports


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_supervisor_that_is_killed_leaves_nothing_that_carries_the_mark(program, number):
    source = (
        CHILDREN
        + """
note(os.getppid()); grandchild_in_a_session(); daemon(); settled(3)
open("ready", "w").close()
time.sleep(60)
"""
    )
    thread, reports = launch_in_thread(program, source)
    supervisor = recorded(program.trial_dir)[0]
    os.kill(supervisor, number)
    thread.join(15)
    record = judge(reports[0], knobs={}).record
    assert record.outcome == "interrupted"
    assert not any(is_alive(pid) for pid in recorded(program.trial_dir))


def test_two_launches_at_once_do_not_touch_each_other(tmp_path):
    source = (
        "import json, time; time.sleep(1.5); "
        "json.dump({'outcome': 'ok', 'step_time_s': 1}, open('result.json', 'w'))"
    )
    reports = {}

    def run(name, deadline_s):
        reports[name] = launch(
            [sys.executable, "-c", source],
            trial_dir=tmp_path / name,
            startup_deadline_s=deadline_s,
            deadline_s=20,
        )

    threads = [
        threading.Thread(target=run, args=(name, deadline_s))
        for name, deadline_s in (("lasts", 20.0), ("is ended", 0.5))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert judge(reports["lasts"], knobs={}).record.outcome == "ok"
    assert judge(reports["is ended"], knobs={}).record.outcome == "timeout"


def test_memory_of_the_tree_and_of_its_largest_process_are_told_apart(program):
    report = program.launch(
        """
        import subprocess, sys
        GROW = "block = bytearray(80 << 20); import time; time.sleep(1.5)"
        children = [subprocess.Popen([sys.executable, "-c", GROW]) for _ in range(2)]
        for child in children:
            child.wait()
        """
    )
    assert 80 << 20 < report.supervised.peak_rss_bytes < 120 << 20
    assert 160 << 20 < report.supervised.peak_tree_rss_bytes < 260 << 20


def test_a_short_peak_between_two_samples_is_seen(program):
    report = program.launch("bytearray(200 << 20)")
    assert 200 << 20 < report.supervised.peak_rss_bytes < 240 << 20


def test_descendants_do_not_hold_the_process_itself():
    child = subprocess.Popen(["sleep", "30"])
    try:
        found = {process.pid for process in descendants(os.getpid())}
        assert child.pid in found
        assert os.getpid() not in found
    finally:
        child.kill()
        child.wait()
    assert child.pid not in {process.pid for process in descendants(os.getpid())}


GIVEN_UP = "RuntimeError: Failed to initialize distributed job cluster because some processes ..."
NO_NETWORK = "[ERROR] DISTRIBUTED(7): Building networking for MS_SCHED failed."


@pytest.mark.parametrize(
    ("ended", "rank_log", "scheduler_log", "again"),
    [
        (("scheduler", "rank1"), GIVEN_UP, NO_NETWORK, True),
        (("rank1", "scheduler"), GIVEN_UP, NO_NETWORK, True),  # all wait equally long
        (("rank1",), "ValueError: on purpose", NO_NETWORK, False),  # the others wait for it
        (("rank1", "scheduler"), GIVEN_UP, "", False),
        ((), "", NO_NETWORK, False),
    ],
)
def test_ranks_that_did_not_meet_are_told_from_one_that_died(
    tmp_path, ended, rank_log, scheduler_log, again
):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "worker_1.log").write_text(rank_log)
    (ranks / "scheduler.log").write_text(scheduler_log)
    codes = {"command": None, "rank0": None, "rank1": 1, "scheduler": 1}
    ending = SupervisorReport(ended_by="rank_failed", exit_codes=codes, own_exits=ended)
    assert launcher._failed_to_meet(ending, ranks) is again
    table = tmp_path / "signals.csv"
    table.touch()
    assert not launcher._failed_to_meet(ending, ranks), "they had met before"
    # Of a run that goes on, the table has the steps of its earlier segments.
    assert launcher._failed_to_meet(ending, ranks, recorded=0) is again
    table.write_text("step\n1\n")
    assert not launcher._failed_to_meet(ending, ranks, recorded=0), "they had met before"


def test_a_second_attempt_takes_nothing_of_the_earlier_segments_of_a_run(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "scheduler.log").touch()
    segments = {"result.segment_1.json", "result.unreadable.json"}
    for name in (*segments, "result.json", "result.rank3.json"):
        (tmp_path / name).touch()
    launcher._set_attempt_aside(ranks)
    assert {path.name for path in tmp_path.iterdir()} == {*segments, "ranks.attempt1"}
    kept = {path.name for path in (tmp_path / "ranks.attempt1").iterdir()}
    assert kept == {"scheduler.log", "result.json", "result.rank3.json"}
