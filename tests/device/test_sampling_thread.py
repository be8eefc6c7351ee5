"""The sampling thread with drivers that are slow, raise, hang or come back."""

import threading
import time

import pytest

from mindtune.controller.device import DeviceReading, ProbeError, SamplingThread
from mindtune.controller.errors import ConfigError


class ScriptedProbe:
    """Answers each read with the next step of a script, then with the last one for ever."""

    name = "scripted"
    min_period_s = 0.001

    def __init__(self, *steps):
        self.steps = list(steps)
        self.reads = 0
        self.closed_by = []

    def read(self):
        step = self.steps[min(self.reads, len(self.steps) - 1)]
        self.reads += 1
        value = step() if callable(step) else step
        if isinstance(value, BaseException):
            raise value
        return DeviceReading(device_utilization=value)

    def close(self):
        self.closed_by.append(threading.current_thread().name)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.002)
    raise AssertionError("the condition did not come true")


def test_the_newest_reading_comes_with_its_age():
    clock = Clock()
    probe = ScriptedProbe(0.25)
    with SamplingThread(probe, period_s=60.0, stale_after_s=100.0, clock=clock) as sampler:
        until(lambda: sampler.latest() is not None)
        clock.now = 40.0
        assert sampler.latest() == (DeviceReading(device_utilization=0.25), 40.0)
        clock.now = 100.0
        assert sampler.latest().age_s == 100.0
        clock.now = 100.5
        assert sampler.latest() is None
        assert sampler.mean_utilization(1000.0) is None
        assert sampler.reading() == DeviceReading()


def test_a_hanging_driver_blocks_nobody_and_its_thread_is_left_behind():
    release = threading.Event()
    probe = ScriptedProbe(0.5, lambda: release.wait(60) or 0.5)
    sampler = SamplingThread(probe, period_s=0.01, stale_after_s=0.2).start()
    until(lambda: probe.reads == 2)
    slowest = 0.0
    for _ in range(200):
        begin = time.perf_counter()
        sampler.latest()
        sampler.mean_utilization(1.0)
        slowest = max(slowest, time.perf_counter() - begin)
        time.sleep(0.002)
    assert slowest < 0.1
    assert sampler.latest() is None
    assert sampler.stop(timeout_s=0.05) is False
    assert probe.closed_by == []
    release.set()
    assert sampler.stop(timeout_s=10.0) is True
    assert probe.closed_by == ["mindtune-sampler"]


@pytest.mark.parametrize("error", [ProbeError("GPU is lost"), OSError("driver"), KeyError("x")])
def test_a_raising_driver_ends_nothing_and_may_come_back(error, caplog):
    probe = ScriptedProbe(0.1, error, error, 0.9)
    with SamplingThread(probe, period_s=0.005) as sampler:
        until(lambda: probe.reads >= 2 and sampler.last_error is not None)
        assert type(error).__name__ in sampler.last_error
        assert sampler.latest().reading.device_utilization == 0.1
        until(lambda: sampler.latest().reading.device_utilization == 0.9)
        assert sampler.last_error is None
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1


def test_a_driver_that_stays_dead_is_asked_ever_less_often():
    probe = ScriptedProbe(RuntimeError("dead"))
    with SamplingThread(probe, period_s=0.01):
        time.sleep(1.0)
        # Pauses of 0.02, 0.04, ... 0.64 s: the seventh read comes after 1.26 s.
        assert 2 <= probe.reads <= 6


def test_mean_utilization_weighs_by_time():
    clock = Clock()
    spans = iter([(10.0, 0.9), (11.0, 0.1), (14.0, 0.5)])

    def step():
        clock.now, value = next(spans)
        return value

    probe = ScriptedProbe(step, step, step, lambda: stay.wait(60) or 0.0)
    stay = threading.Event()
    sampler = SamplingThread(probe, period_s=0.001, stale_after_s=100.0, clock=clock).start()
    try:
        until(lambda: probe.reads == 4)
        # Covered: 0 to 10 s at 0.9, 10 to 11 at 0.1, 11 to 14 at 0.5.
        assert sampler.mean_utilization(3.0) == pytest.approx(0.5)
        assert sampler.mean_utilization(4.0) == pytest.approx((3 * 0.5 + 0.1) / 4)
        assert sampler.mean_utilization(6.0) == pytest.approx((3 * 0.5 + 0.1 + 2 * 0.9) / 6)
        assert sampler.mean_utilization(99.0) == pytest.approx((9.0 + 0.1 + 1.5) / 14)
    finally:
        stay.set()
        assert sampler.stop(timeout_s=10.0)


def test_readings_without_utilization_have_no_mean():
    probe = ScriptedProbe(None)
    with SamplingThread(probe, period_s=0.01) as sampler:
        until(lambda: sampler.latest() is not None)
        assert sampler.mean_utilization(1.0) is None


def test_history_is_bounded():
    clock = Clock()

    def step():
        clock.now += 1.0
        return 0.5

    probe = ScriptedProbe(step)
    with SamplingThread(probe, period_s=0.001, history_s=10.0, clock=clock) as sampler:
        until(lambda: probe.reads > 50)
        assert len(sampler._stored) <= 11


def test_the_probe_s_least_period_holds():
    probe = ScriptedProbe(0.5)
    probe.min_period_s = 60.0
    with SamplingThread(probe, period_s=0.001):
        until(lambda: probe.reads == 1)
        time.sleep(0.1)
        assert probe.reads == 1


def test_stop_is_safe_twice_and_before_start():
    probe = ScriptedProbe(0.5)
    sampler = SamplingThread(probe)
    assert sampler.stop() is True
    assert probe.closed_by == ["MainThread"]
    running = SamplingThread(ScriptedProbe(0.5), period_s=0.01).start()
    assert running.stop() is True
    assert running.stop() is True


@pytest.mark.parametrize("name", ["period_s", "stale_after_s", "history_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_times_must_be_positive(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be above 0 seconds"):
        SamplingThread(ScriptedProbe(0.5), **{name: value})
