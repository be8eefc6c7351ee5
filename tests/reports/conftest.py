"""Records of a run that has everything a report can show, and of a finished study."""

import math

import pytest

from mindtune.controller.contract import DecisionRecord, ModelSignalRecord, RunResult, write_json
from mindtune.controller.records import DecisionWriter, ModelSignalWriter, RunFolder, SignalWriter
from mindtune.controller.reports.language import LANGUAGES
from mindtune.controller.reports.write import write_report
from mindtune.controller.trials.summary import Measurement, StudySummary, TrialSummary
from mindtune.policies.signals import Observation

BROKEN = 70
LAYERS = ["embedding", "block0.attention", "block0.mlp"]


def observation(step):
    broken = step in (BROKEN, BROKEN + 1)
    return Observation(
        step=step, wall_time_s=step / 4, phase={1: "compile", 100: "eval"}.get(step, "train"),
        loss=math.nan if broken else 2 + 3 * math.exp(-step / 40),
        eval_loss=2.4 if step == 100 else None,
        grad_norm=math.nan if broken else 1 + (step % 7) / 10 + 50 * (step == 40),
        overflow=float(broken), update_skipped=float(broken), loss_scale=2.0 ** (15 - step // 60),
        learning_rate=1e-3 * min(1, step / 20), learning_rate_scale=0.5 if step > 71 else 1.0,
        clip_norm=math.inf, skip_threshold=math.inf if step < 32 else 9.0, global_batch_size=16,
        micro_batch_size=8, num_microbatches=2, tokens=2048, mfu=0.3 + (step % 3) / 100,
        step_time_s=9.0 if step == 1 else 0.25 + (step % 5) / 100, data_time_s=(step % 4) / 100,
        tokens_per_s=8000.0 + step, device_utilization=0.9 + (step % 3) / 100,
        device_memory_used_bytes=2**30 + step * 2**20, device_memory_total_bytes=2**34,
        memory_allocated_bytes=2**30, device_temperature_c=60.0 + step % 3,
        device_power_w=300.0 + step % 5, update_norm=0.01 if step % 10 == 0 else None,
        straggler_ratio=1 + (step % 3) / 10,
    )  # fmt: skip


@pytest.fixture(scope="session")
def rich_run(tmp_path_factory):
    """Write a run of 120 steps with every signal, every fate of a decision, and samples."""
    records = RunFolder(tmp_path_factory.mktemp("rich") / "rich")
    records.create()
    signals = SignalWriter(records.signals)
    for step in range(1, 121):
        signals.write(observation(step))
    signals.close()
    decisions = DecisionWriter(records.decisions)
    for step, action, verdict, outcome in (
        (
            20,
            "SetClipNorm",
            "granted",
            "median loss went from 4.306 to 3.346 in 16 steps (tolerance of a raise: 0.76)",
        ),
        (30, "SetLossScale", "granted", "undone: 9 of 16 steps overflowed since"),
        (31, "SetLossScale", "undone", None),
        (45, "SetBatchSize", "refused", None),
        (50, "SetMicroBatch", "observed", None),
        (72, "SetLearningRateScale", "granted", None),
        (
            90,
            "SetBatchSize",
            "granted",
            (
                "ineffective: global_batch_size was set to 32, but 4 steps later the training step "
                "still reports 16"
            ),
        ),
    ):
        decisions.write(DecisionRecord(
            step=step, policy="gradient_norm", action=action, requested=0.5, before=1.0,
            acted=0.5, verdict=verdict, reason="the update of norm 42.1 is poisoned: usual is 0.9",
            outcome=outcome,
        ))  # fmt: skip
    decisions.write(DecisionRecord(
        step=72, policy="rewind", action="Rewind", requested="rewind-72-1", acted=60,
        verdict="granted", reason="the loss was nan, 2 steps in a row; its update was skipped.: back to the last "
        "healthy state, past the data since then",
    ))  # fmt: skip
    decisions.write(DecisionRecord(
        step=95, policy="batch_size", action="Advise", requested="data-workers",
        verdict="granted", reason="60% of the time of the last 32 steps was spent waiting for data (limit 20%).",
    ))  # fmt: skip
    decisions.close()
    samples = ModelSignalWriter(records.model_signals)
    for step in range(10, 121, 10):
        samples.write(ModelSignalRecord(
            step=step, layers=LAYERS, gradient_norms=[0.1, 0.2, 0.3],
            gradient_counts=[[0] * 5 + [step, 1000, 500] + [0] * 8] * 3, gradient_zeros=[3] * 3,
            update_ratios=[1e-3, 2e-3, 1e-3], attention_entropy=[[3.0, 2.5], [2.0, 4 / step]],
        ))  # fmt: skip
    samples.close()
    (records.path / "config.yaml").write_text(
        "training: {steps: 120, precision: float16, hub_token: hunter2}\n"
    )
    write_json(records.result, RunResult(
        outcome="ok", steps=120, wall_s=42.0, final_loss=2.1, eval_loss=2.4, actions=4,
        peak_memory_bytes=2**30, effective={"recompute": "none"},
    ))  # fmt: skip
    return records.path


@pytest.fixture(scope="session")
def rich_pages(rich_run):
    """Return the HTML reports of that run by language."""
    return {
        language: write_report(rich_run, rich_run.parent / f"{language}.html", language=language)
        for language in LANGUAGES
    }


def measured(repeat, value):
    return Measurement(
        repeat=repeat, seed=0, outcome="ok", value=value, mfu=value, stability=1.0,
        step_time_s=0.1 / value, peak_memory_bytes=2**26, wall_s=9.0,
    )  # fmt: skip


@pytest.fixture
def study_summary():
    """Return the summary of a finished study with one of everything."""
    changed = {"recompute": ("full", "none")}
    return StudySummary(
        study="s", complete=True, objective="mfu", planned=3, total=12, feasible=3,
        rejected=[{"rule": "memory", "count": 9, "reason": "predicted memory = 9.0GB must be at most "
                   "constraints.max_memory = 8.0GB", "example": None}],
        trials=[
            TrialSummary(number=0, knobs={"recompute": "full"}, outcome="ok", value=0.2,
                         interval=(0.19, 0.21), confirmed=True,
                         measurements=[measured(0, 0.2), measured(1, 0.19), measured(2, 0.21)]),
            TrialSummary(number=1, knobs={"recompute": "none"}, outcome="ok", value=0.3,
                         interval=(0.29, 0.31), confirmed=True,
                         measurements=[measured(0, 0.3), measured(1, 0.29), measured(2, 0.31)]),
            TrialSummary(number=2, knobs={"recompute": "interval:2"}, outcome="oom",
                         message="Allocate memory failed"),
            TrialSummary(number=3, knobs={"recompute": "interval:4"}, outcome="pruned", value=0.9),
        ],
        leaders=[1], winner=1, reason="1.50 x the base config's value (95 % interval 1.40 to 1.60)",
        search_ended="3 of 3 trials are done", front=[1],
        kept=[{"trial": 1, "value": 0.3, "gain": 1.5, "different": False, "changed": changed,
               "version": "abc", "way_back": "mindtune export . --trial 1 --out trial_1.yaml"}],
        ablation=[{"trial": 1, "since": 0, "changed": changed, "value": 0.3, "ratio": 1.5,
                   "different": True}],
        noise={"step": 0.031, "launch": 0.052, "launch_freedom": 2},
    )  # fmt: skip


@pytest.fixture
def study_folder(tmp_path, study_summary):
    """Write that study's summary into a folder."""
    folder = tmp_path / "study"
    folder.mkdir()
    write_json(folder / "summary.json", study_summary)
    return folder
