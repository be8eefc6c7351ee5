"""The watchdog by an injected clock; its thread and its exit in real processes."""

import subprocess
import sys
import threading
import time

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.watchdog import HANG_EXIT_CODE, Watchdog, WatchdogLimits

MINUTE = 60.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hangs():
    return []


def watchdog(clock, hangs, **options):
    return Watchdog(hangs.append, clock=clock, **options)


def train(dog, clock, steps, step_s, first=1):
    for step in range(first, first + steps):
        dog.heartbeat(step, "train")
        clock.now += step_s
    return first + steps - 1


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [("compile", 1800.0), ("train", 600.0), ("eval", 1800.0), ("save", 1800.0)],
)
def test_each_phase_has_its_own_limit(clock, hangs, phase, limit_s):
    dog = watchdog(clock, hangs)
    dog.heartbeat(7, phase)
    clock.now += limit_s
    assert dog.check() is None
    clock.now += 0.5
    hang = dog.check()
    assert (hang.stalled_s, hang.limit_s, hang.step, hang.phase) == (
        limit_s + 0.5, limit_s, 7, phase,
    )  # fmt: skip
    assert hangs == [hang]
    assert hang.message() == (
        f"no heartbeat for {limit_s:.0f} s in phase {phase} after step 7 (limit {limit_s:.0f} s)"
    )


def test_before_the_first_step_the_limit_of_compiling_holds(clock, hangs):
    dog = watchdog(clock, hangs)
    clock.now += 900.0  # a first step of 15 minutes is no hang
    assert dog.check() is None
    dog.heartbeat(1, "train")
    assert dog.check() is None
    assert hangs == []


def test_a_forgotten_save_does_not_kill_a_run_that_went_on(clock, hangs):
    dog = watchdog(clock, hangs, limits=WatchdogLimits(save_s=20 * MINUTE))
    dog.heartbeat(10, "save")
    for step in range(11, 60):
        clock.now += MINUTE
        dog.heartbeat(step, "train")
        assert dog.check() is None
    assert hangs == []


def test_after_a_restart_nothing_old_counts(clock, hangs):
    dog = watchdog(clock, hangs, limits=WatchdogLimits(save_s=MINUTE, train_min_s=MINUTE))
    train(dog, clock, 50, 30.0)
    assert dog.limit_s() == 10 * MINUTE
    dog.heartbeat(51, "save")
    clock.now += 59.0
    dog.reset()
    clock.now += 900.0  # the first step after the restart compiles
    assert dog.check() is None
    dog.heartbeat(51, "train")
    for step in (52, 53, 54):
        clock.now += 1.0
        dog.heartbeat(step, "train")
    assert dog.limit_s() == MINUTE  # the old step times are gone
    assert hangs == []


def test_a_stall_is_raised_once_and_again_after_recovery(clock, hangs):
    dog = watchdog(clock, hangs)
    step = train(dog, clock, 5, 1.0)
    clock.now += 700.0
    assert dog.check().step == step
    clock.now += 5000.0
    assert dog.check() is None
    dog.heartbeat(step + 1, "train")
    assert dog.check() is None
    clock.now += 601.0
    assert dog.check().step == step + 1
    assert len(hangs) == 2


@pytest.mark.parametrize(("learnt_s", "limit_s"), [(None, 600.0), (0.4, 600.0), (900.0, 18000.0)])
def test_until_a_run_has_its_own_step_times_those_of_the_trials_lengthen_the_limit(
    clock, hangs, learnt_s, limit_s
):
    dog = watchdog(clock, hangs, step_time_s=learnt_s)
    train(dog, clock, 3, 1.0)
    assert dog.limit_s() == limit_s
    dog.heartbeat(4, "train")
    assert dog.limit_s() == 600.0, "here the steps take a second"


@pytest.mark.parametrize(
    ("step_s", "limit_s"), [(1.0, 600.0), (29.0, 600.0), (31.0, 620.0), (120.0, 2400.0)]
)
def test_the_limit_of_training_follows_the_median_heartbeat(clock, hangs, step_s, limit_s):
    dog = watchdog(clock, hangs)
    train(dog, clock, 20, step_s)
    assert dog.limit_s() == pytest.approx(limit_s)


def test_one_long_step_does_not_move_the_limit(clock, hangs):
    dog = watchdog(clock, hangs)
    last = train(dog, clock, 20, 40.0)
    dog.heartbeat(last + 1, "train")
    clock.now += 550.0
    train(dog, clock, 20, 40.0, first=last + 2)
    assert dog.limit_s() == pytest.approx(800.0)


def test_a_step_lasts_from_advance_to_advance_however_often_the_heart_beats(clock, hangs):
    dog = watchdog(clock, hangs)
    for step in range(30):
        dog.heartbeat(step, "train")  # the data is there
        clock.now += 10.0
        dog.heartbeat(step, "train")  # a micro-batch is done
        clock.now += 10.0
        dog.heartbeat(step + 1, "train")  # the step is done, the wait for data begins
        clock.now += 20.0
    assert dog.limit_s() == pytest.approx(20 * 40.0)


def test_a_sink_of_many_steps_counts_as_one_interval(clock, hangs):
    dog = watchdog(clock, hangs)
    for sink in range(1, 10):
        dog.heartbeat(100 * sink, "train")
        clock.now += 90.0
    assert dog.limit_s() == pytest.approx(1800.0)


def test_time_of_evaluation_and_saving_is_no_step_time(clock, hangs):
    dog = watchdog(clock, hangs)
    for step in range(1, 20):
        dog.heartbeat(step, "train")
        clock.now += 1.0
        dog.heartbeat(step, "eval")
        clock.now += 1000.0
    dog.heartbeat(20, "train")
    assert dog.limit_s() == 600.0


def test_the_limit_slides_with_the_newest_hundred_steps(clock, hangs):
    dog = watchdog(clock, hangs)
    last = train(dog, clock, 200, 100.0)
    train(dog, clock, 102, 40.0, first=last + 1)
    assert dog.limit_s() == pytest.approx(800.0)


def test_stacks_of_all_threads_are_written(clock, hangs, tmp_path):
    def sleeping_in_a_step():
        release.wait(30)

    release = threading.Event()
    thread = threading.Thread(target=sleeping_in_a_step)
    thread.start()
    try:
        dog = watchdog(clock, hangs, stacks_path=tmp_path / "stacks.txt")
        clock.now += 1801.0
        hang = dog.check()
    finally:
        release.set()
        thread.join()
    text = (tmp_path / "stacks.txt").read_text()
    assert hang.stacks == tmp_path / "stacks.txt"
    assert hang.message().endswith(f"Python stacks in {tmp_path / 'stacks.txt'}")
    assert "no heartbeat for 1801 s" in text
    assert "in sleeping_in_a_step" in text


def test_stacks_that_cannot_be_written_hide_no_hang(clock, hangs, tmp_path):
    dog = watchdog(clock, hangs, stacks_path=tmp_path / "no" / "folder" / "stacks.txt")
    clock.now += 1801.0
    assert dog.check().stacks is None
    assert len(hangs) == 1


def test_a_callback_that_raises_ends_nothing(clock, caplog):
    def fail(hang):
        raise RuntimeError("the alert did not go out")

    dog = Watchdog(fail, clock=clock)
    clock.now += 1801.0
    assert dog.check() is not None
    assert "the alert did not go out" in caplog.text


def test_the_thread_raises_from_its_own_name_and_stops():
    seen = []
    raised = threading.Event()

    def on_hang(hang):
        seen.append((threading.current_thread().name, hang.step, hang.phase))
        raised.set()

    dog = Watchdog(on_hang, limits=WatchdogLimits(train_min_s=0.05), poll_s=0.01)
    dog.start()
    dog.heartbeat(3, "train")
    assert raised.wait(10)
    dog.stop()
    dog.stop()
    assert seen == [("mindtune-watchdog", 3, "train")]
    assert "mindtune-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_suspended_process_is_no_hang(clock, hangs):
    limits = WatchdogLimits(train_min_s=30.0)
    dog = Watchdog(hangs.append, limits=limits, poll_s=0.02, clock=clock)
    dog.start()
    dog.heartbeat(1, "train")
    time.sleep(0.1)
    clock.now += 3600.0  # between two polls: nobody ran
    time.sleep(0.2)
    assert hangs == []
    end = time.monotonic() + 30
    while not hangs and time.monotonic() < end:  # time in which the watchdog runs does count
        clock.now += 1.0
        time.sleep(0.03)
    dog.stop()
    assert [hang.step for hang in hangs] == [1]
    assert 30.0 < hangs[0].stalled_s < 40.0


EXIT = """
import logging, logging.handlers, sys, time
from pathlib import Path
from mindtune.controller.live.watchdog import Watchdog, WatchdogLimits
kept = logging.FileHandler(sys.argv[1] + ".log", delay=True)
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, logging.CRITICAL + 1, kept))
def on_hang(hang):
    print("raised", hang.step, hang.phase)
    {last_words}
dog = Watchdog(on_hang, limits=WatchdogLimits(train_min_s=0.2), poll_s=0.02,
               stacks_path=Path(sys.argv[1]), exit_on_hang=True)
dog.start()
dog.heartbeat(12, "train")
def stuck():
    time.sleep(60)
stuck()
"""


@pytest.mark.parametrize("last_words", ["pass", "raise RuntimeError('no network')"])
def test_the_process_ends_with_code_3_and_its_last_words(tmp_path, last_words):
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(last_words=last_words), str(tmp_path / "stacks.txt")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == HANG_EXIT_CODE == 3
    assert done.stdout == "raised 12 train\n"
    assert "no heartbeat for" in (tmp_path / "stacks.txt.log").read_text()
    assert "in stuck" in (tmp_path / "stacks.txt").read_text()


def test_a_callback_that_hangs_does_not_keep_the_process(tmp_path):
    code = EXIT.format(last_words="time.sleep(60)").replace(
        "dog = Watchdog",
        "import mindtune.controller.live.watchdog as w; w._FAREWELL_S = 0.3\ndog = Watchdog",
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 3
    assert time.monotonic() - begin < 40


def test_a_log_that_takes_nothing_more_does_not_keep_the_process(tmp_path):
    # A pipe that nobody reads: the thread that writes into it hangs, with the handler's lock.
    code = (
        EXIT.format(last_words="pass")
        .replace(
            "dog = Watchdog",
            "import mindtune.controller.live.watchdog as w; w._FAREWELL_S = w._LAST_WORDS_S = 0.3\n"
            "logging.getLogger().addHandler(logging.StreamHandler())\ndog = Watchdog",
        )
        .replace(
            'print("raised", hang.step, hang.phase)',
            'print("raised", hang.step, hang.phase, flush=True)',
        )
    )
    code = code.replace("    time.sleep(60)\nstuck()", "    logging.error('x' * 10**6)\nstuck()")
    hung = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert hung.wait(50) == 3
        assert hung.stdout.read() == "raised 12 train\n"
        assert "in stuck" in (tmp_path / "s").read_text()
    finally:
        hung.kill()
        hung.stdout.close()
        hung.stderr.close()


INSIDE_A_GRAPH = """
import numpy as np
import mindspore as ms
from mindspore import ops
from mindtune.controller.live.watchdog import Watchdog, WatchdogLimits
def many_products(matrix):
    product = matrix
    for _ in range(40):
        product = ops.matmul(product, matrix) * 0.001
    return product
ms.set_context(mode=ms.GRAPH_MODE)
graph, matrix = ms.jit(many_products), ms.Tensor(np.ones((1024, 1024), np.float32))
graph(matrix).asnumpy()
hangs = []
dog = Watchdog(hangs.append, limits=WatchdogLimits(train_min_s=0.1), poll_s=0.01)
dog.start()
dog.heartbeat(5, "train")
graph(matrix).asnumpy()
raised_inside = len(hangs)
dog.stop()
print(raised_inside)
"""


@pytest.mark.mindspore
def test_a_call_that_stays_inside_the_framework_is_seen(tmp_path):
    # A collective that waits for a dead rank is such a call: the interpreter must stay free.
    script = tmp_path / "inside_a_graph.py"
    script.write_text(INSIDE_A_GRAPH)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]


def test_an_unknown_phase_is_refused(clock, hangs):
    with pytest.raises(ConfigError, match="must be one of compile, train, eval, save"):
        watchdog(clock, hangs).heartbeat(1, "validate")


@pytest.mark.parametrize("name", ["compile_s", "train_min_s", "train_factor", "eval_s", "save_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_limits_must_be_positive(name, value):
    with pytest.raises(ConfigError, match=f"{name} of the watchdog must be above 0"):
        WatchdogLimits(**{name: value})


def test_infinity_switches_a_limit_off(clock, hangs):
    dog = watchdog(clock, hangs, limits=WatchdogLimits(compile_s=float("inf")))
    clock.now += 1e9
    assert dog.check() is None
