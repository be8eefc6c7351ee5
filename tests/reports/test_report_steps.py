"""A page reads the steps of a run once, and holds no more of them than it shows."""

import json
import math

import pytest

from mindtune.controller.metrics.run_metrics import read_metrics
from mindtune.controller.reports import run_steps
from mindtune.controller.reports.run_records import read_run
from mindtune.controller.reports.run_steps import Points, RunSteps, Signal
from mindtune.controller.reports.time_figures import FATES, Lane, Mark, Span, time_line
from mindtune.policies import detectors
from mindtune.policies.signals import Observation


@pytest.fixture
def resumed_log(tmp_path):
    """Write a log that goes back once, and spikes before and after."""
    log = tmp_path / "train.jsonl"
    lines = []
    for step in [*range(1, 121), *range(101, 221)]:
        loss = 9.0 if step in (90, 180) else 3.0 - step / 200 + step % 3 / 50
        lines.append(f'{{"step": {step}, "loss": {loss}, "grad_norm": {1 + step % 5 / 10}}}')
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return log


def test_the_detectors_look_at_each_step_once(resumed_log, monkeypatch):
    seen = []

    def counted(observation, *arguments, update=detectors.update):
        seen.append(observation.step)
        return update(observation, *arguments)

    monkeypatch.setattr(detectors, "update", counted)
    run = read_run(resumed_log)
    assert seen == [*range(1, 121), *range(101, 221)]
    assert run.steps.count == 240


def test_a_page_has_the_metrics_that_compare_has(resumed_log, rich_run):
    for path in (resumed_log, rich_run):
        own, read = (
            json.dumps(metrics.model_dump(mode="json"))
            for metrics in (read_run(path).metrics, read_metrics(path))
        )
        assert own == read


def test_of_few_points_all_are_kept():
    for points in (Points(), Points(extremes=False)):
        for step in range(1, 1000):
            points.add(step, step % 7)
        assert points.steps == list(range(1, 1000))
        assert points.values() == [step % 7 for step in range(1, 1000)]


def test_of_very_many_points_the_extremes_stay_and_all_parts_weigh_alike(monkeypatch):
    monkeypatch.setattr(run_steps, "_MOST", 256)
    points, regular = Points(2), Points(extremes=False)
    for step in range(1, 20_001):
        value = {7_777: 1e6, 15_000: -5.0, 100: math.nan}.get(step, 2 + (step * 7919 % 101) / 100)
        points.add(step, 1e-3, value)
        regular.add(step, value)
    for kept in (points, regular):
        steps = kept.steps
        assert 64 <= len(steps) <= 256 + 2 * 128
        assert steps == sorted(set(steps))
        early = sum(step <= 10_000 for step in steps)
        assert 0.35 * len(steps) < early < 0.65 * len(steps)
    values = points.values(1)
    assert values[points.steps.index(7_777)] == 1e6
    assert values[points.steps.index(15_000)] == -5.0
    assert set(points.values(0)) == {1e-3}


def test_a_signal_knows_what_cannot_be_drawn_and_whether_it_ever_changes():
    signal = Signal(2.0)
    for step, value in enumerate([2.0, 2.0, 2.0], start=1):
        signal.add(step, value)
    assert signal.constant == 2.0
    for step, value in enumerate([math.nan, math.inf, 1e200], start=4):
        signal.add(step, value)
    assert signal.constant is None
    assert signal.broken.steps == [4, 5, 6]


def test_times_of_a_step_that_compiles_are_left_out_and_a_limit_that_is_off_is_no_value():
    steps = RunSteps(last_action=2)
    for step, phase in enumerate(["compile", "train", None, "save"], start=1):
        steps.take(Observation(
            step=step, phase=phase, loss=math.nan if step == 2 else 3.0, step_time_s=float(step),
            data_time_s=0.5, clip_norm=math.inf, learning_rate=1e-3, update_skipped=step == 2,
        ))  # fmt: skip
    assert list(steps.distributions["step_time_s"]) == [2.0, 3.0]
    assert list(steps.waits) == [0.25, 0.5 / 3]
    assert steps.signals["step_time_s"].points.steps == [2, 3]
    assert steps.signals["loss"].points.steps == [1, 2, 3, 4]
    assert "clip_norm" not in steps.signals
    assert steps.spent_s == {"compile": 1.0, "eval": 0.0, "save": 4.0}
    assert (steps.broken_losses, steps.losses_since_action, steps.skipped) == (1, 2, 1)
    assert steps.maps["loss"].steps == [1, 3, 4]


def test_thousands_of_findings_and_decisions_are_drawn_small():
    spans = [Span(step, step, "critical") for step in range(1, 100_001, 10)]
    marks = [Mark(step, FATES["observed"]) for step in range(1, 100_001, 10)]
    names = {"critical": "critical", "observed": "only observed"}
    drawing = time_line(
        None, [Lane("loss", spans), Lane("policy", marks=marks)], step_label="step", names=names
    )
    assert len(drawing) < 150_000
    assert ">only observed<" in drawing


def test_a_severity_is_told_by_thickness_and_by_name_besides_its_colour():
    names = {"critical": "critical", "warning": "warning", "info": "remark"}
    lanes = [Lane(name, [Span(1, 9, name)]) for name in names]
    drawing = time_line(None, lanes, step_label="step", names=names)
    for name, width in (("critical", "10"), ("warning", "6"), ("remark", "2.5")):
        assert f">{name}<" in drawing
        assert f'stroke-width="{width}"' in drawing


def test_a_dollar_in_a_name_begins_no_formula():
    drawing = time_line(
        None, [Lane(r"a $\frac b$ c", [Span(1, 2, "info")])], step_label="step",
        names={"info": "remark"},
    )  # fmt: skip
    assert r">a $\frac b$ c<" in drawing
