"""When the profiler opens, how long, how often, and what it leaves; once with MindSpore's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindtune.controller.contract import ProfilerSection
from mindtune.controller.live.observing import StepTime
from mindtune.controller.live.profiler_window import ProfilerWindow
from mindtune.controller.metrics.profile_summary import Shares
from mindtune.controller.records import RunFolder, read_profiles
from mindtune.policies.findings import Finding, FindingKind, Severity

HERE = Path(__file__).parent


class ScriptedProfiler:
    """Says what was asked of it; `ready` after so many looks, `broken` in a call."""

    def __init__(self, *, ready=0, broken=None, unreadable=0):
        self.calls = []
        self.looks = 0
        self._unreadable = unreadable
        self.spans = []
        self._ready = ready
        self._broken = broken

    def start(self, folder):
        self._call("start")

    def stop(self):
        self._call("stop")

    def shares(self, folder, steps):
        self.spans = steps
        self.looks += 1
        if self.looks <= self._unreadable:
            raise ValueError("half a table")
        self._ready -= 1
        return (
            Shares(compute=0.5, communication=0.2, overlap=0.5, busy=0.6)
            if self._ready < 0
            else None
        )

    def _call(self, name):
        self.calls.append(name)
        if name == self._broken:
            raise RuntimeError("no permission")


def spike(step):
    return Finding(
        step=step,
        last_step=step,
        kind=FindingKind.STEP_TIME_SPIKE,
        severity=Severity.WARNING,
        message="slow",
    )


class Run:
    """A run of one-second steps beside a window."""

    def __init__(self, folder, profiler, **settings):
        folder.mkdir(exist_ok=True)
        self.now = 0.0
        self.folder = RunFolder(folder)
        self.window = ProfilerWindow(
            ProfilerSection(**settings), profiler, self.folder, clock=lambda: self.now
        )
        self.profiled = []

    def step(self, number, *, phase=None, findings=()):
        self.window._looked_s = -10.0  # a request is looked for once a second
        self.now += 1.0
        if self.window.is_open:
            self.profiled.append(number)
            phase = phase or "profile"
        timed = StepTime(number, 1.0, phase or "train")
        if self.window.take(timed, data_time_s=0.1, findings=findings):
            self.now += 0.25
            self.window.turn()

    def records(self):
        return read_profiles(self.folder.profiles)


def test_a_named_finding_opens_it_for_a_few_steps_and_the_summary_is_written(tmp_path):
    profiler = ScriptedProfiler()
    run = Run(tmp_path / "run", profiler, findings=["step_time_spike"], steps=3)
    for step in range(1, 11):
        run.step(step, findings=(spike(step),) if step == 4 else ())
    assert run.profiled == [5, 6, 7]
    (record,) = run.records()
    assert (record.first_step, record.last_step, record.steps) == (5, 7, 3)
    assert (record.reason, record.step_time_s) == ("step_time_spike", 1.0)
    assert record.data_share == pytest.approx(0.1)
    assert record.host_share == pytest.approx(0.3)
    assert (record.compute_share, record.communication_share) == (0.5, 0.2)
    assert record.files == "profiles/step_5"
    # What opening and closing took lies in no step.
    assert [round(end - begin, 6) for begin, end in profiler.spans] == [1.0, 1.0, 1.0]


def test_no_finding_opens_it_unless_it_is_named(tmp_path):
    profiler = ScriptedProfiler()
    run = Run(tmp_path / "run", profiler)
    for step in range(1, 5):
        run.step(step, findings=(spike(step),))
    assert profiler.calls == []


def test_windows_have_a_budget_and_a_gap_that_a_resumed_run_keeps(tmp_path):
    settings = {"findings": ["step_time_spike"], "steps": 1, "max_windows": 2, "gap": 5}
    run = Run(tmp_path / "run", ScriptedProfiler(), **settings)
    for step in range(1, 10):
        run.step(step, findings=(spike(step),))
    assert run.profiled == [2, 8]
    for step in range(10, 30):
        run.step(step, findings=(spike(step),))
    assert run.profiled == [2, 8]
    again = Run(tmp_path / "run", ScriptedProfiler(), **settings)
    for step in range(30, 40):
        again.step(step, findings=(spike(step),))
    assert again.profiled == []


def test_a_request_opens_it_inside_the_gap_and_not_beyond_the_budget(tmp_path, caplog):
    run = Run(tmp_path / "run", ScriptedProfiler(), steps=1, max_windows=1)
    run.folder.profile_request.touch()
    run.step(1)
    assert run.window.is_open
    assert not run.folder.profile_request.exists()
    run.step(2)
    assert run.records()[0].reason == "request"
    run.folder.profile_request.touch()
    run.step(3)
    assert not run.window.is_open
    assert not run.folder.profile_request.exists()
    assert "no profiler window is left of 1" in caplog.text


def test_steps_that_compiled_are_passed_over_but_not_for_ever(tmp_path):
    profiler = ScriptedProfiler()
    run = Run(tmp_path / "run", profiler, steps=2)
    run.folder.profile_request.touch()
    run.step(1)
    run.step(2, phase="compile")
    run.step(3)
    run.step(4, phase="eval")
    run.step(5)
    (record,) = run.records()
    assert (record.first_step, record.last_step, record.steps) == (3, 5, 2)
    run.folder.profile_request.touch()
    for step in range(6, 20):
        run.step(step, phase="compile")
    assert not run.window.is_open
    assert len(run.records()) == 1


def test_a_summary_that_comes_later_is_written_later_and_at_the_end_at_last(tmp_path):
    run = Run(tmp_path / "run", ScriptedProfiler(ready=2), steps=1)
    run.folder.profile_request.touch()
    for step in range(1, 4):
        run.step(step)
    assert run.records() == []
    run.step(4)
    assert run.records()[0].compute_share == 0.5
    late = Run(tmp_path / "late", ScriptedProfiler(ready=99), steps=1)
    late.folder.profile_request.touch()
    late.step(1)
    late.step(2)
    late.window.end()
    assert "was not ready when the run ended" in late.records()[0].message
    assert late.records()[0].compute_share is None


def test_a_run_that_ends_inside_a_window_closes_it(tmp_path):
    profiler = ScriptedProfiler()
    run = Run(tmp_path / "run", profiler, steps=9)
    run.folder.profile_request.touch()
    run.step(1)
    run.step(2)
    run.window.end()
    assert profiler.calls == ["start", "stop"]
    assert run.records()[0].steps == 1


def test_a_run_that_ends_before_a_step_of_the_window_closes_it_too(tmp_path):
    profiler = ScriptedProfiler()
    run = Run(tmp_path / "run", profiler)
    run.folder.profile_request.touch()
    run.step(1)
    run.window.end()
    assert profiler.calls == ["start", "stop"]
    assert not run.window.is_open
    assert run.records() == []


@pytest.mark.parametrize(("unreadable", "share"), [(2, 0.5), (99, None)])
def test_what_cannot_be_read_yet_is_looked_at_again_but_not_for_ever(tmp_path, unreadable, share):
    profiler = ScriptedProfiler(unreadable=unreadable)
    run = Run(tmp_path / "run", profiler, steps=1)
    run.folder.profile_request.touch()
    for step in range(1, 20):
        run.step(step)
    (record,) = run.records()
    assert record.compute_share == share
    assert profiler.looks == min(unreadable + 1, 5)
    if share is None:
        assert record.message == "what the profiler wrote cannot be read: half a table"


def test_what_cannot_be_read_at_the_end_is_said_and_ends_nothing(tmp_path):
    run = Run(tmp_path / "run", ScriptedProfiler(unreadable=99), steps=1)
    run.folder.profile_request.touch()
    run.step(1)
    run.step(2)
    run.window.end()
    assert run.records()[0].message.endswith("cannot be read: half a table")


def test_a_request_that_cannot_be_taken_away_is_said_once(tmp_path, caplog):
    run = Run(tmp_path / "run", ScriptedProfiler())
    run.folder.profile_request.mkdir()
    for step in range(1, 4):
        run.step(step)
    assert not run.window.is_open
    assert caplog.text.count("so it is not heard") == 1


def test_a_step_over_which_the_clock_was_set_back_tells_nothing(tmp_path):
    run = Run(tmp_path / "run", ScriptedProfiler(), steps=2)
    run.folder.profile_request.touch()
    run.step(1)
    run.now -= 3600.0
    for step in range(2, 5):
        run.step(step)
    (record,) = run.records()
    assert (record.first_step, record.steps, record.step_time_s) == (3, 2, 1.0)


@pytest.mark.parametrize("broken", ["start", "stop"])
def test_a_profiler_that_fails_rests_and_ends_nothing(tmp_path, broken, caplog):
    profiler = ScriptedProfiler(broken=broken)
    run = Run(tmp_path / "run", profiler, steps=1)
    for step in range(1, 8):
        run.folder.profile_request.touch()
        run.step(step)
    assert profiler.calls.count("start") == 1
    assert "the profiler failed and rests from now on: no permission" in caplog.text


@pytest.mark.mindspore
def test_mindspore_s_profiler_in_graph_and_pynative_mode(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "single_profile.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    for mode in ("graph", "pynative"):
        run = seen[mode]
        (record,) = run["profiles"]
        assert (record["first_step"], record["last_step"], record["steps"]) == (2, 4, 3)
        assert record["reason"] == "request"
        assert record["message"] == ""
        shares = [record[f"{name}_share"] for name in ("compute", "data", "host")]
        assert all(0 < share < 1 for share in shares)
        # Waiting and kernels do not overlap on CPU: the three are all there is.
        assert sum(shares) == pytest.approx(1.0, abs=0.05)
        assert record["communication_share"] == 0.0
        assert "MatMul" in [kernel["kind"] for kernel in record["kernels"]]
        assert run["phases"] == ["compile", "profile", "profile", "profile", "train", "train"]
        assert run["losses"] == seen[f"{mode}_closed"]["losses"]
        assert run["metrics"]["compute_share"] == pytest.approx(record["compute_share"])
    told = seen["graph"]["conditions"]
    assert (told["num_devices"], told["seed"]) == (1, 1)
    assert "cores" in told["hardware"]
    assert {"mindspore", "numpy"} <= set(told["versions"])
    # The program's own profiler is left alone.
    assert seen["busy"]["profiles"] == []
    assert seen["busy"]["still_open"]
