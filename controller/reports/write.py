"""Write the report of a run or a study, whichever the folder holds."""

from __future__ import annotations

from pathlib import Path

from mindtune.controller.contract import write_atomic
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import RunFolder
from mindtune.controller.reports.page import render
from mindtune.controller.reports.run_report import run_page
from mindtune.controller.reports.study_report import study_page
from mindtune.controller.trials.study_folder import StudyFolder

__all__ = ["write_report"]


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report and return where it is.

    Args:
        folder: of a run, a trial or a study.
        out: an .html file; None: report.html in the folder.

    Raises:
        ConfigError: if the folder holds neither, or `out` is no .html file.
    """
    target = out or folder / "report.html"
    if target.suffix != ".html":
        raise ConfigError(f"a report must be an .html file, but got {target.name!r}.")
    if StudyFolder(folder).summary.exists():
        page = study_page(folder)
    elif RunFolder(folder).signals.exists():
        page = run_page(folder)
    else:
        raise ConfigError(
            f"{folder} must be the folder of a run (with signals.csv) or of a study (with "
            "summary.json), but it is neither."
        )
    write_atomic(target, render(page))
    return target
