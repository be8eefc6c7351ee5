"""The report of one run, or of a log of any program."""

from __future__ import annotations

from pathlib import Path

from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Page, number
from mindtune.controller.reports.run_dimensions import dimension_sections
from mindtune.controller.reports.run_model import gradient_section, model_sections
from mindtune.controller.reports.run_records import read_run
from mindtune.controller.reports.run_signals import course, rate_map, signal_sections, times
from mindtune.controller.reports.run_summary import opening
from mindtune.controller.reports.run_tables import (
    decisions_section,
    diagnosis_section,
    incidents_section,
    provenance_section,
)

__all__ = ["run_page"]


def run_page(path: Path, words: Words) -> Page:
    """Return the report of a run's folder, or of a log; a killed run has one too.

    Raises:
        ConfigError: there is nothing to read, or something in it cannot be read.
    """
    run = read_run(path)
    first = opening(run, words)
    sections = [
        course(run, words),
        incidents_section(run, words),
        diagnosis_section(run, words),
        decisions_section(run, words),
        *dimension_sections(run.metrics, words),
        *signal_sections(run, words),
        rate_map(run, words),
        times(run, words),
        gradient_section(run, words),
        *model_sections(run, words),
        provenance_section(run, words),
    ]
    return Page(
        words=words,
        title=words("run.log" if run.is_log else "run.title", name=run.name),
        subtitle=words(
            "run.subtitle", steps=number(run.steps.count), source=run.source.name,
            format=run.story.format,
        ),
        tone=first.tone,
        verdict=first.verdict,
        lead=first.lead,
        quotes=first.quotes,
        cards=first.cards,
        sections=[section for section in sections if section is not None],
    )  # fmt: skip
