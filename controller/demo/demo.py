"""Search, export and a guarded run with a fault, on the bundled workload.

The workload is started by name like any user's program. Its study and base config stand beside
this module; the fault is a learning rate thirty times too high, planted in the production run
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mindtune.controller.contract import (
    DecisionRecord,
    FaultPlan,
    RunResult,
    read_document,
    write_atomic,
)
from mindtune.controller.contract.fault_plan import LearningRateJump
from mindtune.controller.records import RunFolder, read_decisions
from mindtune.controller.reports.write import write_report
from mindtune.controller.trials.production import run_best_config
from mindtune.controller.trials.progress import Listener, StudyNote
from mindtune.controller.trials.study_runner import StudyResult, run_study

__all__ = ["FAULT", "DemoResult", "run_demo"]

FAULT = FaultPlan(faults=(LearningRateJump(kind="learning_rate_jump", first_step=1, factor=30.0),))
"""What is planted in the guarded run."""


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the demo left."""

    study: StudyResult
    best_config: Path | None
    run_dir: Path | None
    """None: the study found no config that works."""
    run_result: RunResult | None
    decisions: tuple[DecisionRecord, ...]
    report: Path | None
    study_report: Path
    exit_code: int


def run_demo(
    out: Path, *, trials: int | None = None, on_event: Listener | None = None
) -> DemoResult:
    """Run the demo in `out`; a stopped one goes on where it was.

    Raises:
        ConfigError: if the folder cannot be used.
    """
    emit = on_event or (lambda _event: None)
    project, study_dir = out / "project", out / "study"
    for name in ("study.yaml", "base.yaml", "layouts.csv"):
        source = resources.files("mindtune.controller.demo").joinpath(name)
        write_atomic(project / name, source.read_text(encoding="utf-8"))
    study = run_study(project / "study.yaml", study_dir, trials=trials, on_event=on_event)
    study_report = write_report(study_dir)
    if study.best_config is None:
        return DemoResult(
            study=study, best_config=None, run_dir=None, run_result=None, decisions=(),
            report=None, study_report=study_report, exit_code=study.exit_code,
        )  # fmt: skip
    run_dir = _fresh(out)
    emit(StudyNote(message=f"guarded run with a learning rate 30x too high, in {run_dir}"))
    exit_code = run_best_config(study.best_config, run_dir, "act", faults=FAULT)
    records = RunFolder(run_dir)
    return DemoResult(
        study=study,
        best_config=study.best_config,
        run_dir=run_dir,
        run_result=read_document(RunResult, records.result),
        decisions=tuple(read_decisions(records.decisions)),
        report=write_report(run_dir),
        study_report=study_report,
        exit_code=exit_code,
    )


def _fresh(out: Path) -> Path:
    """Return the first run folder that no earlier demo has used."""
    number = 1
    while (out / f"run_{number}").exists():
        number += 1
    return out / f"run_{number}"
