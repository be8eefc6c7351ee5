"""Rows of the fault experiment: model, file, resume, table; no training."""

import json
import math
import random
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from mindtune.controller.contract import DecisionRecord, RunResult, write_json
from mindtune.controller.contract.fault_plan import KINDS
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.settings import split_best_config
from mindtune.controller.records import DecisionWriter, RunFolder, SignalWriter
from mindtune.experiments.fault_injection import experiment
from mindtune.experiments.fault_injection.__main__ import main
from mindtune.experiments.fault_injection.cases import (
    CASES,
    GUARDS,
    chosen_cases,
    chosen_guards,
    healthy_case,
)
from mindtune.experiments.fault_injection.experiment import plan, run_rows
from mindtune.experiments.fault_injection.measure import RowFacts, measure_run, steps_above
from mindtune.experiments.fault_injection.rows import FaultRow, append_row, read_rows
from mindtune.experiments.fault_injection.seen import (
    false_actions,
    findings_of,
    seen_fault,
    steps_rewound,
)
from mindtune.experiments.fault_injection.summary import spread, summary
from mindtune.experiments.gpt.config import parse_config
from mindtune.experiments.provenance import OtherWork, Provenance, provenance
from mindtune.policies.findings import FindingKind, Severity
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
        "findings": {"divergence": 1}, "detected_step": 7, "false_actions": {}, "final_batch_size": 16, "tokens_per_s": 1000.0, "wall_s": 20.0,
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


def test_delays_and_lost_steps_come_from_the_row():
    assert row().detection_delay == 6
    assert row().steps_lost == 3
    assert row(steps_rewound=4).steps_lost == 7
    assert row(detected_step=None).detection_delay is None
    assert row(fault_step=None).detection_delay is None
    assert row().stop_delay is None
    assert row(outcome="stopped").stop_delay == 9


def test_a_row_of_an_earlier_version_is_still_read(tmp_path):
    older = row().to_plain()
    for name in ("detected_step", "other_findings", "false_actions", "steps_rewound"):
        del older[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(older) + "\n")
    assert read_rows(path)[("learning_rate", "guarded", 0)].detected_step is None


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
    with pytest.raises(ConfigError, match="row 2: .* must stand once"):
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
        {
            "step": 0,
            "policy": "sensors",
            "action": "Advise",
            "requested": "planted_faults",
            "verdict": "granted",
        },
        {"step": 6, "action": "SetBatchSize", "requested": 16, "verdict": "refused"},
        {"step": 10, "action": "SetBatchSize", "requested": 16, "verdict": "granted"},
        {"step": 10, "action": "SetBatchSize", "requested": 16, "verdict": "granted", "acted": 16},
        {"step": 15, "action": "Advise", "requested": "batch-limit", "verdict": "granted"},
        {"step": 18, "action": "SetBatchSize", "requested": 8, "verdict": "undone"},
    ):
        decisions.write(DecisionRecord(**{**base, **entry}))
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
    assert (measured.first_action_step, measured.detection_delay) == (10, None)
    assert measured.false_actions == {"SetBatchSize": 1, "SetSkipThreshold": 2}
    # 9 steps of 80 tokens and 10 of 160 in 19 halves of a second; the compile does not count.
    assert measured.tokens_per_s == pytest.approx((9 * 80 + 10 * 160) / 9.5)
    assert measured.final_batch_size == 16


def observations(count, **at):
    """Steps whose gradient norm is 1, but for `at[s7] = 300.0`."""
    draw = random.Random(0)
    return [
        Observation(
            step=step, loss=3.0 - 0.001 * step + 0.01 * draw.random(),
            grad_norm=at.get(f"s{step}", 1.0 + 0.05 * draw.random()),
        )
        for step in range(1, count + 1)
    ]  # fmt: skip


def test_a_fault_is_named_by_the_first_finding_of_its_kinds_after_its_begin():
    found = findings_of(observations(60, s45=300.0, s50=300.0))
    expected = {FindingKind.GRAD_NORM_SPIKE}
    seen = seen_fault(found, fault_step=50, expected=expected, hung=False)
    assert seen.detected_step == 50
    early = replace(found[0], severity=Severity.WARNING)
    # Before the fault it is a false alarm, though of the right kind.
    seen = seen_fault([early], fault_step=50, expected=expected, hung=False)
    assert (early.step, seen.detected_step) == (45, None)
    assert seen.other_findings == {"grad_norm_spike": 45}
    # A shift of the level is named when it is declared, not in the step that it begins with.
    shift = replace(found[0], step=49, last_step=72)
    assert seen_fault([shift], fault_step=50, expected=expected, hung=False).detected_step == 72
    other = seen_fault(found, fault_step=45, expected={FindingKind.PLATEAU}, hung=False)
    assert other.detected_step is None
    assert seen_fault([], fault_step=9, expected={FindingKind.HANG}, hung=True).detected_step == 9


@pytest.mark.parametrize(
    ("record", "counted"),
    [
        ({}, {}),
        ({"step": 29}, {"SetLearningRateScale": 1}),
        ({"action": "SetBatchSize"}, {"SetBatchSize": 1}),
        ({"action": "Advise", "requested": "x"}, {}),
        ({"action": "SetSkipThreshold", "step": 5}, {}),
        ({"verdict": "observed", "action": "SetBatchSize"}, {}),
        ({"verdict": "refused", "action": "SetBatchSize"}, {}),
    ],
)
def test_only_what_the_fault_does_not_justify_is_a_false_action(record, counted):
    known = {"step": 30, "policy": "p", "action": "SetLearningRateScale", "requested": 0.5,
             "verdict": "granted", "reason": "r", **record}  # fmt: skip
    decisions = [DecisionRecord(**known)]
    justified = {"SetLearningRateScale"}
    assert false_actions(decisions, [], fault_step=30, justified=justified) == counted


def test_an_update_skipped_without_a_cause_is_a_false_action():
    steps = [
        Observation(step=1, update_skipped=1.0, overflow=1.0),
        Observation(step=2, update_skipped=1.0, overflow=0.0),
        Observation(step=9, update_skipped=1.0, overflow=0.0),
    ]
    known = {"fault_step": 9, "justified": {"SetSkipThreshold"}}
    assert false_actions([], steps, **known) == {"SetSkipThreshold": 1}
    assert false_actions([], steps, **{**known, "justified": set()}) == {"SetSkipThreshold": 2}


def test_the_steps_of_rewinds_are_lost():
    known = {"policy": "rewind", "action": "Rewind", "requested": "a", "reason": "r"}
    decisions = [
        DecisionRecord(**known, step=60, verdict="granted", acted=52),
        DecisionRecord(**known, step=70, verdict="refused"),
    ]
    assert steps_rewound(decisions) == 8


def test_the_plan_holds_every_guard_of_every_seed_once():
    rows = plan(chosen_cases(None), (0, 1), {})
    keys = [planned.key for planned in rows]
    assert len(keys) == len(set(keys)) == 2 * sum(len(case.guards) for case in CASES.values())
    assert {key[2] for key in keys[: len(keys) // 2]} == {0}


@pytest.mark.parametrize("name", list(CASES))
def test_every_row_has_a_config_that_the_workload_takes(name):
    for planned in plan([CASES[name]], (0,), {}, (*GUARDS[1:],)):
        best, live = split_best_config(planned.best_config, source="a row")
        tree: dict = {}
        for key, value in best.overrides.items():
            *path, last = key.split(".")
            place = tree
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        config = parse_config(tree)
        assert config.training.steps == CASES[name].steps
        first = CASES[name].first_step(planned.steps)
        assert {fault.first_step for fault in live.faults} <= {first}
        assert all(fault.acts(first) and not fault.acts(first - 1) for fault in live.faults)
        assert (first is None) == name.startswith("healthy")


def test_every_fault_of_the_injector_is_a_case():
    planted = {fault.kind for case in CASES.values() for fault in case.faults(case.steps)}
    # The workload's own pipeline is slow in a way that more workers cure.
    assert planted == set(KINDS) - {"slow_data"}


def test_faulty_cases_are_compared_with_a_healthy_one_of_their_size():
    pairs = {name: healthy_case(case) for name, case in CASES.items()}
    assert pairs["nan_loss"].name == pairs["hang"].name == "healthy"
    assert pairs["overflow_storm"].name == "healthy_float16"
    assert pairs["slow_rank"].name == "healthy_two_ranks"
    assert pairs["small_batch"] is pairs["healthy_long"] is None


def test_the_healthy_case_comes_along_once_and_only_if_wanted():
    cases = chosen_cases("nan_loss,spike")
    names = [planned.key[:2] for planned in plan(cases, (0,), {"nan_loss": 50, "spike": 50})]
    assert names == [
        ("nan_loss", "guarded"), ("nan_loss", "unguarded"), ("healthy", "guarded"),
        ("spike", "guarded"), ("spike", "unguarded"),
    ]  # fmt: skip
    only = plan(cases, (0,), {}, chosen_guards("unguarded"))
    assert [planned.key[:2] for planned in only] == [
        ("nan_loss", "unguarded"), ("spike", "unguarded"),
    ]  # fmt: skip


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
    cases = chosen_cases("learning_rate,learning_rate_jump")
    rows = plan(cases, (0, 1), {"learning_rate": 50})
    assert len({planned.config_hash for planned in rows}) == len(rows)
    assert rows[0].config_hash == plan(cases, (0,), {"learning_rate": 50})[0].config_hash


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
    rows = plan(chosen_cases("healthy"), (0, 1), {"healthy": 10})
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
    run_rows(tmp_path, plan(chosen_cases("healthy"), (0,), {"healthy": 10}))
    before = (tmp_path / "rows.jsonl").read_text()
    launches.runs.clear()
    with pytest.raises(ConfigError, match="must hold rows of one size, but healthy-guarded-0"):
        run_rows(tmp_path, plan(chosen_cases("healthy"), (0,), {"healthy": 11}))
    assert launches.runs == []
    assert (tmp_path / "rows.jsonl").read_text() == before


def test_the_row_is_in_the_file_before_the_next_run_starts(tmp_path, launches, monkeypatch):
    lengths = []

    def counting(best, out, mode):
        path = tmp_path / "rows.jsonl"
        lengths.append(len(read_rows(path)))
        return launches(best, out, mode)

    monkeypatch.setattr(experiment, "run_best_config", counting)
    run_rows(tmp_path, plan(chosen_cases("healthy"), (0, 1), {"healthy": 10}))
    assert lengths == [0, 1, 2, 3]


def test_the_table_holds_median_range_and_ratios():
    rows = [
        *(row(seed=seed, validation_loss=loss) for seed, loss in enumerate((2.0, 2.5, 2.25))),
        *(
            row(seed=seed, guard="unguarded", validation_loss=loss, actions={},
                proposed={"SetLearningRateScale": 3}, steps_above=9)
            for seed, loss in enumerate((4.0, 5.0, 2.25))
        ),
        *(row(seed=seed, fault="healthy", fault_step=None, detected_step=None, steps=200,
              validation_loss=2.0, actions={}, false_actions={"SetBatchSize": seed})
          for seed in (0, 1)),
    ]  # fmt: skip
    table = summary(rows)
    assert (
        "| `learning_rate` | `guarded` | 3 | 3 of 3 | 6 | none | 3 | 2.250 [2.000, 2.500] | "
        "1.125 [1.000, 1.250] | 0.500 [0.500, 1.000] | ok | SetLearningRateScale 2 |" in table
    )
    assert "(SetLearningRateScale 3)" in table
    assert "| `healthy` | `guarded` | 2 | - | - | SetBatchSize 0 [0, 1] |" in table
    assert "Healthy steps under acting policies: 400 in 2 runs; actions in them: 1." in table
    assert "Test CPU, 2 cores; MindSpore 2.10.0" in table
    assert "Share of the cores that others took: 25%." in table
    assert "Diagnoses" not in table


def test_the_table_names_stops_with_their_delay_and_diagnosis():
    stopped = [
        row(fault="nan_for_ever", seed=seed, outcome="stopped", steps=15 + seed, fault_step=10,
            message="the gradients are not finite\nat step 14", validation_loss=math.nan)
        for seed in (0, 1)
    ]  # fmt: skip
    table = summary([*stopped, row(fault="nan_for_ever", seed=2, outcome="non_finite")])
    assert "| non_finite 1, stopped 2 after 6 [5, 6] |" in table
    assert "- `nan_for_ever`, `guarded`, seed 0: the gradients are not finite\n" in table


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
        (["--faults", "healthy,slow"], "--faults must name some of healthy, healthy_float16"),
        (
            ["--guards", "guarded,none"],
            "--guards must name some of fault_free, guarded, unguarded",
        ),
        (["--healthy-steps", "0"], "--healthy-steps must be 4 or more, but got 0"),
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
