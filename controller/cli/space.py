"""`mindtune space`: count a space, say per rule what is rejected; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table

from mindtune.controller.cli.console import out, print_json
from mindtune.controller.errors import ConfigError

if TYPE_CHECKING:
    from mindtune.controller.contract import ExplainOutput, Predicted, SpaceOutput
    from mindtune.search.constraints import Explanation, SpaceReport
    from mindtune.search.cost_model import Prediction
    from mindtune.search.knobs import Config

__all__ = ["space"]

EXIT_EMPTY = 1
_SHOWN = 20
"""Configs shown to a person; `--json` gives up to `--limit`."""


def space(
    study: Annotated[Path, typer.Argument(help="Study file.", metavar="STUDY.yaml")],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    limit: Annotated[int, typer.Option(help="Most configs to list; counts are whole.", min=0)] = (
        1000
    ),
    explain: Annotated[
        str | None,
        typer.Option(help="One config, k=v,...; unnamed knobs come from the base config."),
    ] = None,
) -> int:
    """Count the configs of a study and say, per rule, what is rejected and why; runs nothing."""
    from mindtune.controller.trials.study_setup import load_study
    from mindtune.search.constraints import check
    from mindtune.search.constraints import explain as explain_config

    setup = load_study(study)
    if explain is not None:
        explanation = explain_config(setup.space, {**setup.base, **_knobs(explain)})
        document = _explained(explanation)
        print_json(document) if json else _print_explanation(document)
        return 0
    report = check(setup.space)
    listing = _listed(report, limit)
    print_json(listing) if json else _print_report(report, listing)
    return 0 if report.feasible else EXIT_EMPTY


def _knobs(text: str) -> dict[str, object]:
    knobs: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"--explain must be knob=value pairs with commas between, but got {part!r}; e.g. "
                "--explain data_parallel=2,recompute=none."
            )
        knobs[name.strip()] = value.strip()
    return knobs


def _predicted(prediction: Prediction) -> Predicted:
    from mindtune.controller.contract import Predicted

    return Predicted(
        memory_bytes=prediction.memory_bytes,
        step_time_s=prediction.step_time_s,
        mfu=prediction.mfu,
    )


def _listed(report: SpaceReport, limit: int) -> SpaceOutput:
    from mindtune.controller.contract import (
        AdviceCount,
        RejectedRule,
        SpaceConfig,
        SpaceOutput,
    )

    return SpaceOutput(
        total=report.total,
        feasible=report.feasible,
        rejected=[
            RejectedRule(rule=r.rule, count=r.count, reason=r.reason, example=r.example)
            for r in report.rejected
        ],
        configs=[
            SpaceConfig(config=entry.config, predicted=_predicted(entry.prediction))
            for entry in report.configs[:limit]
        ],
        advice=[
            AdviceCount(rule=a.rule, count=a.count, reason=a.reason, example=a.example)
            for a in report.advice
        ],
        emptied_by=report.emptied_by,
        notes=list(report.notes),
    )


def _explained(explanation: Explanation) -> ExplainOutput:
    from mindtune.controller.contract import ExplainOutput, RejectedRule

    return ExplainOutput(
        config=explanation.config,
        feasible=not explanation.rejected,
        rejected=[
            RejectedRule(rule=r.rule, count=r.count, reason=r.reason, example=r.example)
            for r in explanation.rejected
        ],
        advice=list(explanation.advice),
        predicted=_predicted(explanation.prediction),
    )


def _print_report(report: SpaceReport, listing: SpaceOutput) -> None:
    from mindtune.controller.units import format_duration, format_size
    from mindtune.search.knobs import describe

    console = out()
    share = 1 - listing.feasible / listing.total
    console.print(
        f"{listing.total} configs, {listing.feasible} feasible; rules reject {share:.0%} before "
        "anything runs"
    )
    for note in listing.notes:
        console.print(f"note: {note}")
    searched = report.space.searched
    silent = sum(not rule.count for rule in listing.rejected)
    for rule in listing.rejected:
        if rule.count:
            console.print(f"\n{rule.count} rejected by {rule.rule}")
            _print_reason(rule.reason, rule.example, searched)
    if silent:
        console.print(f"\n{silent} other rules reject nothing here; --json lists them")
    if listing.emptied_by is not None:
        console.print(f"\n{listing.emptied_by}")
        return
    spoken = [advice for advice in listing.advice if advice.count]
    if spoken:
        console.print("\nadvice, which orders and rejects nothing:")
    for advice in spoken:
        console.print(f"{advice.rule} speaks against {advice.count} of the feasible configs")
        _print_reason(advice.reason, advice.example, searched)
    console.print()
    common = _common([entry.config for entry in report.configs])
    if common:
        console.print(f"every feasible config has {describe(common)}")
    configs = Table("config, best predicted first", "memory", "step", "MFU", box=None)
    for entry in listing.configs[:_SHOWN]:
        guess = entry.predicted
        own = {name: value for name, value in entry.config.items() if name not in common}
        configs.add_row(
            describe(own) or "the only one",
            "-" if guess.memory_bytes is None else format_size(guess.memory_bytes),
            "-" if guess.step_time_s is None else format_duration(guess.step_time_s),
            "-" if guess.mfu is None else f"{guess.mfu:.1%}",
        )
    console.print(configs)
    shown = min(len(listing.configs), _SHOWN)
    if listing.feasible > shown:
        console.print(f"... and {listing.feasible - shown} more; --json lists them")


def _print_reason(reason: str, example: Config | None, searched: Sequence[str]) -> None:
    """Print why, and one config that it is said of, by the knobs that tell configs apart."""
    from mindtune.search.knobs import describe

    own = {name: value for name, value in (example or {}).items() if name in searched}
    for line in (reason, f"e.g. {describe(own)}" if own else ""):
        if line:
            out().print(Padding(line, (0, 0, 0, 4), expand=False))


def _common(configs: Sequence[Config]) -> Config:
    """Return the knobs that have one value in all configs, at least one of them."""
    first, *others = configs
    return {
        name: value
        for name, value in first.items()
        if all(config[name] == value for config in others)
    }


def _print_explanation(document: ExplainOutput) -> None:
    from mindtune.search.knobs import describe

    console = out()
    console.print(describe(document.config))
    console.print("feasible" if document.feasible else "rejected:")
    for rule in document.rejected:
        console.print(f"  {rule.rule}: {rule.reason}")
    for line in document.advice:
        console.print(f"  advice: {line}")
