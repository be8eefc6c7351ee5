"""Write the report of a run, a study or a log, whichever it is."""

from __future__ import annotations

from pathlib import Path

from mindtune.controller.contract import write_atomic
from mindtune.controller.errors import ConfigError
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Page, render
from mindtune.controller.reports.pdf import to_pdf
from mindtune.controller.reports.run_report import run_page
from mindtune.controller.reports.study_report import study_page
from mindtune.controller.trials.study_folder import StudyFolder

__all__ = ["write_report"]


def write_report(source: Path, out: Path | None = None, *, language: str = "en") -> Path:
    """Write the report and return where it is.

    Args:
        source: folder of a run, a trial or a study, or the log of any training.
        out: an .html or a .pdf file; None: report.html in the folder, beside a log
            LOG.report.html.
        language: of `LANGUAGES`.

    Raises:
        ConfigError: if there is nothing to report on, `out` is of another kind, or it is a .pdf
            and the extra `pdf` is not installed.
    """
    words = Words(language)
    target = out or _beside(source)
    if target.suffix not in (".html", ".pdf"):
        raise ConfigError(f"a report must be an .html or a .pdf file, but got {target.name!r}.")
    page = _page(source, words)
    if target.suffix == ".pdf":
        write_atomic(target, to_pdf(page))
    else:
        write_atomic(target, render(page))
    return target


def _beside(source: Path) -> Path:
    if source.is_dir():
        return source / "report.html"
    return source.with_name(f"{source.name}.report.html")


def _page(source: Path, words: Words) -> Page:
    if StudyFolder(source).summary.exists():
        return study_page(source, words)
    return run_page(source, words)
