"""Rows of the fault experiment: model, file, resume, table; no training."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from mindtune.controller.contract import DecisionRecord, RunResult, write_json
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import DecisionWriter, RunFolder, SignalWriter
from mindtune.experiments.fault_injection import experiment
from mindtune.experiments.fault_injection.__main__ import main
from mindtune.experiments.fault_injection.cases import CASES, chosen_cases
from mindtune.experiments.fault_injection.experiment import plan, run_rows
from mindtune.experiments.fault_injection.measure import RowFacts, measure_run, steps_above
from mindtune.experiments.fault_injection.rows import FaultRow, append_row, read_rows
from mindtune.experiments.fault_injection.summary import spread, summary
from mindtune.experiments.gpt.config import parse_config
from mindtune.experiments.provenance import OtherWork, Provenance, provenance
from mindtune.policies.signals import Observation

PLACE = Provenance(
    processor="Test CPU",
    cores=2,
    python="3.11.0",
    mindspore="2.10.0",
    revision="abc",
    date="2026-01-02",
)


def row(**changes):
    known = {
        "fault": "learning_rate", "guard": "guarded", "seed": 0, "config_hash": "00", "outcome": "ok",
        "steps": 10, "samples": 160, "final_loss": 2.5, "validation_loss": 2.25, "updates_skipped": 1,
        "steps_above": 2, "samples_lost": 48, "actions": {"SetLearningRateScale": 2}, "undone": 0,
        "proposed": {}, "advice": (), "fault_step": 1, "first_action_step": 9,
        "findings": {"divergence": 1}, "final_batch_size": 16, "tokens_per_s": 1000.0, "wall_s": 20.0,
        "load_1m": 0.5, "others_busy": 0.25, "measured": PLACE,
    }  # fmt: skip
    return FaultRow(**{**known, **changes})


def test_a_row_round_trips_with_non_finite_losses(tmp_path):
    path = tmp_path / "rows.jsonl"
    written = row(final_loss=math.nan, validation_loss=math.inf)
    append_row(path, written)
    found = read_rows(path)[("learning_rate", "guarded", 0)]
    assert math.isnan(found.final_loss)
    assert found.validation_loss == math.inf
    assert found.model_copy(update={"final_loss": 1.0}) == written.model_copy(
        update={"final_loss": 1.0}
    )
    assert '"nan"' in path.read_text()


def test_delay_and_lost_steps_come_from_the_row():
    assert row().detection_delay == 8
    assert row().steps_lost == 3
    assert row(first_action_step=None).detection_delay is None
    assert row(fault_step=None).detection_delay is None


def test_a_cut_last_line_is_passed_over_and_then_replaced(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, row())
    with path.open("a") as file:
        file.write(row(seed=1).to_json(indent=None)[:40])
    assert list(read_rows(path)) == [("learning_rate", "guarded", 0)]
    append_row(path, row(seed=2))
    assert [key[2] for key in read_rows(path)] == [0, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n", "line 1 must be JSON"),
        ('{"schema": 1, "fault": "x", "gard": "y"}\n', "unknown key 'gard'"),
    ],
)
def test_a_spoilt_row_file_is_refused(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(path)


def test_a_row_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, row())
    append_row(path, row())
    with pytest.raises(ConfigError, match="line 2: .* must stand once"):
        read_rows(path)


def test_steps_above_marks_what_stands_above_an_earlier_level():
    losses = [4.0, 3.0, 2.0, 2.0, 2.0, 2.4, 2.4, 2.0, math.nan, 2.0, 2.0, None]
    # The median of three is 2.4 once, after two losses of 2.4, and 2.4 / 2 is above 1.15.
    assert [index for index, above in enumerate(steps_above(losses)) if above] == [6, 7, 8]


def test_a_single_spike_and_a_start_are_not_above():
    assert not any(steps_above([5.0, 9.0, 4.0, 3.0, 9.0, 3.0, 2.9]))


FACTS = RowFacts(
    fault="small_batch", guard="guarded", seed=3, config_hash="ff", fault_step=1, wall_s=12.5,
    load_1m=None, others_busy=None, measured=PLACE,
)  # fmt: skip


def write_run(folder, *, outcome="ok"):
    records = RunFolder(folder)
    records.create()
    signals = SignalWriter(records.signals)
    for step in range(1, 21):
        signals.write(
            Observation(
                step=step, phase="compile" if step == 1 else "train", loss=3.0 if step < 19 else 2.0,
                update_skipped=float(step in (2, 3)), global_batch_size=8 if step < 11 else 16,
                tokens=80 if step < 11 else 160, step_time_s=5.0 if step == 1 else 0.5,
            )
        )  # fmt: skip
    signals.close()
    decisions = DecisionWriter(records.decisions)
    base = {"policy": "batch_size", "reason": "idle"}
    for entry in (
        {"step": 6, "action": "SetBatchSize", "requested": 16, "verdict": "refused"},
        {"step": 10, "action": "SetBatchSize", "requested": 16, "verdict": "granted"},
        {"step": 10, "action": "SetBatchSize", "requested": 16, "verdict": "granted", "acted": 16},
        {"step": 15, "action": "Advise", "requested": "batch-limit", "verdict": "granted"},
        {"step": 18, "action": "SetBatchSize", "requested": 8, "verdict": "undone"},
    ):
        decisions.write(DecisionRecord(**base, **entry))
    decisions.close()
    write_json(
        records.result,
        RunResult(
            outcome=outcome, steps=20, wall_s=15.0, eval_loss=2.5, findings={"low_utilization": 1}
        ),
    )


def test_a_run_is_measured_from_its_records(tmp_path):
    write_run(tmp_path)
    measured = measure_run(tmp_path, FACTS)
    assert measured.samples == 10 * 8 + 10 * 16
    assert measured.final_loss == 2.0
    assert measured.validation_loss == 2.5
    assert (measured.updates_skipped, measured.steps_above, measured.samples_lost) == (2, 0, 16)
    assert measured.actions == {"Advise": 1, "SetBatchSize": 1}
    assert measured.undone == 1
    assert measured.advice == ("batch-limit",)
    assert (measured.first_action_step, measured.detection_delay) == (10, 9)
    # 9 steps of 80 tokens and 10 of 160 in 19 halves of a second; the compile does not count.
    assert measured.tokens_per_s == pytest.approx((9 * 80 + 10 * 160) / 9.5)
    assert measured.final_batch_size == 16


def test_the_plan_holds_every_guard_of_every_seed_once():
    rows = plan(chosen_cases(None), (0, 1), None)
    keys = [planned.key for planned in rows]
    assert len(keys) == len(set(keys)) == 2 * sum(len(case.guards) for case in CASES.values())
    assert {key[2] for key in keys[: len(keys) // 2]} == {0}


@pytest.mark.parametrize("name", list(CASES))
def test_every_row_has_a_config_that_the_workload_takes(name):
    for planned in plan([CASES[name]], (0,), None):
        tree: dict = {}
        for key, value in planned.best_config.overrides.items():
            *path, last = key.split(".")
            place = tree
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        config = parse_config(tree)
        assert config.training.steps == CASES[name].steps


def test_guards_of_a_case_see_equal_samples():
    shape = ("training.global_batch_size", "training.micro_batch_size", "training.seed", "training.steps",
             "model.seq_length", "model.num_layers")  # fmt: skip
    for case in CASES.values():
        seen = {
            tuple(case.overrides(guard, seed=1, steps=50).get(key) for key in shape)
            for guard in case.guards
        }
        assert len(seen) == 1, case.name


def test_the_config_hash_tells_mode_and_overrides_apart():
    rows = plan(chosen_cases("learning_rate"), (0, 1), 50)
    assert len({planned.config_hash for planned in rows}) == len(rows)
    assert rows[0].config_hash == plan(chosen_cases("learning_rate"), (0,), 50)[0].config_hash


class Launches:
    """Stands for the processes: leaves the records of a run, or what a crashed one leaves."""

    def __init__(self):
        self.runs = []
        self.crashing = set()

    def __call__(self, best, out, mode):
        name = best.parent.name
        self.runs.append((name, mode))
        write_run(out, outcome="crash" if name in self.crashing else "ok")
        return 3 if name in self.crashing else 0


@pytest.fixture
def launches(monkeypatch):
    fake = Launches()
    monkeypatch.setattr(experiment, "run_best_config", fake)
    return fake


def test_a_finished_row_is_never_repeated_and_a_failed_one_is(tmp_path, launches):
    rows = plan(chosen_cases("healthy"), (0, 1), 10)
    launches.crashing = {"healthy-unguarded-0"}
    assert run_rows(tmp_path, rows) == 1
    assert launches.runs == [
        ("healthy-guarded-0", "act"), ("healthy-unguarded-0", "observe"),
        ("healthy-guarded-1", "act"), ("healthy-unguarded-1", "observe"),
    ]  # fmt: skip
    first = (tmp_path / "rows.jsonl").read_text()
    assert len(first.splitlines()) == 3
    launches.runs.clear()
    launches.crashing = set()
    assert run_rows(tmp_path, rows) == 0
    assert launches.runs == [("healthy-unguarded-0", "observe")]
    assert (tmp_path / "rows.jsonl").read_text().startswith(first)
    launches.runs.clear()
    assert run_rows(tmp_path, rows) == 0
    assert launches.runs == []
    assert "| `healthy` | `guarded` | 2 |" in (tmp_path / "results.md").read_text()


def test_rows_of_two_sizes_do_not_mix(tmp_path, launches):
    run_rows(tmp_path, plan(chosen_cases("healthy"), (0,), 10))
    before = (tmp_path / "rows.jsonl").read_text()
    launches.runs.clear()
    with pytest.raises(ConfigError, match="must hold rows of one size, but healthy-guarded-0"):
        run_rows(tmp_path, plan(chosen_cases("healthy"), (0,), 11))
    assert launches.runs == []
    assert (tmp_path / "rows.jsonl").read_text() == before


def test_the_row_is_in_the_file_before_the_next_run_starts(tmp_path, launches, monkeypatch):
    lengths = []

    def counting(best, out, mode):
        path = tmp_path / "rows.jsonl"
        lengths.append(len(read_rows(path)))
        return launches(best, out, mode)

    monkeypatch.setattr(experiment, "run_best_config", counting)
    run_rows(tmp_path, plan(chosen_cases("healthy"), (0, 1), 10))
    assert lengths == [0, 1, 2, 3]


def test_the_table_holds_median_range_and_comparison():
    rows = [
        *(row(seed=seed, validation_loss=loss) for seed, loss in enumerate((2.0, 2.5, 2.25))),
        *(
            row(seed=seed, guard="unguarded", validation_loss=loss, actions={},
                proposed={"SetLearningRateScale": 3}, steps_above=9)
            for seed, loss in enumerate((3.0, 3.0, 2.0))
        ),
    ]  # fmt: skip
    table = summary(rows)
    assert (
        "| `learning_rate` | `guarded` | 3 | 160 | 2.250 [2.000, 2.500] | 2.500 | 1 | 2 |" in table
    )
    assert "| SetLearningRateScale 2 | 9 | 8 |" in table
    assert "(SetLearningRateScale 3)" in table
    assert "+0.500 [-0.250, +1.000]; guarded is lower in 2 of 3" in table
    assert "Test CPU, 2 cores; MindSpore 2.10.0" in table
    assert "Share of the cores that others took: 25%." in table


def test_the_table_counts_a_missing_action_as_none():
    rows = [row(seed=0), row(seed=1, actions={})]
    assert "SetLearningRateScale 1 [0, 2]" in summary(rows)
    assert "| none |" in summary([row(actions={})])
    assert summary([]) == "No row has been measured yet.\n"


def test_spread():
    assert spread([], "{:.1f}") == "-"
    assert spread([2.0, 2.0], "{:.1f}") == "2.0"
    assert spread([3.0, 1.0, 2.5], "{:.1f}") == "2.5 [1.0, 3.0]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "healthy,slow"], "--faults must name some of healthy, learning_rate"),
        (["--faults", ","], "--faults must name some of"),
        (["--seeds", "0,x"], "--seeds must be whole numbers from 0"),
        (["--steps", "3"], "--steps must be 4 or more, but got 3"),
    ],
)
def test_wrong_use_is_told_and_writes_nothing(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_provenance_names_this_machine():
    facts = provenance()
    assert facts.cores > 0
    assert facts.mindspore[0].isdigit()
    assert json.loads(facts.to_json()) == facts.to_plain()
    assert (
        replace(FACTS, measured=facts)
        .measured.sentence()
        .endswith(f"revision `{facts.revision}`.")
    )


def test_what_others_take_is_told_from_the_own_work():
    busy = "import time\nwhile time.process_time() < 1.0: pass"
    others = OtherWork()
    subprocess.run([sys.executable, "-c", busy], check=True)
    own = others.share()
    others = OtherWork()
    process = subprocess.Popen([sys.executable, "-c", busy])
    try:
        # A child that has not ended is not yet counted as own: it stands for another process.
        while sum(psutil.Process(process.pid).cpu_times()[:2]) < 0.9:
            time.sleep(0.05)
        foreign = others.share()
    finally:
        process.wait()
    assert 0 <= own < foreign <= 1
