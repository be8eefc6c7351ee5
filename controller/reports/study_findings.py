"""Sections of a study's report beside the winner: each knob's share, noise, front, kept steps."""

from __future__ import annotations

from collections.abc import Mapping

from mindtune.controller.reports.figures import Point, scatter
from mindtune.controller.reports.page import Column, Section, Table, number
from mindtune.controller.trials.summary import StudySummary
from mindtune.controller.units import format_size
from mindtune.search.knobs import KnobValue, knob_text

__all__ = ["ablation_section", "front_section", "kept_section", "noise_section"]


def ablation_section(summary: StudySummary) -> Section | None:
    """Return what each knob gave on the way from the base config to the best."""
    if summary.winner in (None, 0):
        return None
    title = "What each knob gave"
    if not summary.ablation:
        text = "Base or best config has no value, so nothing can be said."
        return Section(title, text=text)
    rows = [
        [
            _changes(step.changed), _trial(step.since), _trial(step.trial), number(step.value),
            f"{step.ratio:.2f} x", _VERDICTS[step.different],
        ]
        for step in summary.ablation
    ]  # fmt: skip
    text = (
        "From the base config to the best, one step after the other; the factors multiply to the "
        "whole. The values of base and best are the medians of their confirming launches, where "
        "there are any, those between are of one launch each."
    )
    if any(len(step.changed) > 1 for step in summary.ablation):
        text += (
            " Knobs in one line changed together: no config between was measured, or none can "
            "run. `mindtune search --ablate` measures those that can."
        )
    columns = [
        Column("knobs"), Column("from trial", number=True), Column("to trial", number=True),
        Column("value", number=True), Column("gave", number=True), Column("beyond noise"),
    ]  # fmt: skip
    return Section(title, text=text, table=Table(columns, rows))


_STEPS = "step times within a launch: 1.48 x median distance from their median, median of launches"
_PARTS = "median step times of the second and the last third of each launch"
_COMMON = "what all configs of a round of launches share: the machine at that time"
_VERDICTS = {True: "yes", False: "no", None: "not known"}


def noise_section(summary: StudySummary) -> Section | None:
    """Return how much measurements vary though nothing was changed."""
    noise = summary.noise
    confirmed = sum(trial.confirmed for trial in summary.trials)
    launches = (
        f"values of the confirming launches of {confirmed} configs, "
        f"{noise.launch_freedom} degrees of freedom"
    )
    entries = [
        ("step to step", noise.step, _STEPS),
        ("part to part", noise.part, _PARTS),
        ("launch to launch", noise.launch, launches),
        ("- common to a round", noise.common, _COMMON),
        ("- of each launch", noise.own, "what is left"),
    ]  # fmt: skip
    rows = [[what, f"{share:.1%}", how] for what, share, how in entries if share is not None]
    if not rows:
        return None
    columns = [Column("from"), Column("standard deviation", number=True), Column("measured from")]
    return Section(
        "Noise of the trials",
        text="How much was measured to vary though nothing was changed.",
        table=Table(columns, rows),
    )


def front_section(summary: StudySummary) -> Section | None:
    """Return speed against stability, and the configs that none beats in both."""
    points, rows = [], []
    for trial in summary.trials:
        found = trial.speed_and_stability()
        if found is None:
            continue
        on_front = trial.number in summary.front
        points.append(Point(
            f"{trial.number}{'*' if on_front else ''}", found[1], found[0],
            best=trial.number == summary.winner, base=trial.number == 0,
        ))  # fmt: skip
        if on_front:
            peaks = [m.peak_memory_bytes for m in trial.confirming() if m.peak_memory_bytes]
            rows.append([
                str(trial.number), number(found[0]), number(found[1]),
                format_size(max(peaks)) if peaks else "-", str(len(trial.confirming())),
                "yes" if trial.confirmed else "no",
            ])  # fmt: skip
    if not points:
        return None
    speed = "MFU" if summary.objective == "mfu" else "steps per second"
    columns = [
        Column("trial", number=True), Column(speed, number=True), Column("stability", number=True),
        Column("memory", number=True), Column("launches", number=True), Column("confirmed"),
    ]  # fmt: skip
    return Section(
        "Speed against stability",
        text=(
            "Configs with a star are the front: no other is as good in both and better in one by "
            "more than noise. `mindtune export STUDY_DIR --trial N --out FILE` takes any of them."
        ),
        figure=scatter(points, x="stability", y=speed, title=f"{speed} against stability"),
        table=Table(columns, rows) if rows else None,
    )


def kept_section(summary: StudySummary) -> Section | None:
    """Return the improvements of the search in order, each with the way back."""
    if not summary.kept:
        return None
    rows = [
        [
            str(step.trial), number(step.value),
            "-" if step.gain is None else f"{step.gain:.2f} x",
            "-" if step.gain is None else _VERDICTS[step.different],
            _changes(step.changed) or "the base config", step.version, step.way_back,
        ]
        for step in summary.kept
    ]  # fmt: skip
    columns = [
        Column("trial", number=True), Column("value", number=True), Column("gain", number=True),
        Column("beyond noise"), Column("changed"), Column("version"),
        Column("way back, in the study's folder"),
    ]  # fmt: skip
    return Section(
        "Steps that were kept",
        text="Each config that was the best when it was measured, by one launch of each. The "
        "version is the hash of program, inputs, installed versions and knobs.",
        table=Table(columns, rows),
    )


def _trial(number: int | None) -> str:
    return "for this" if number is None else str(number)


def _changes(changed: Mapping[str, tuple[KnobValue, KnobValue]]) -> str:
    return ", ".join(
        f"{name}: {knob_text(old)} -> {knob_text(new)}" for name, (old, new) in changed.items()
    )
