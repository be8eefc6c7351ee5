"""Stop a simulated trial early, as a study stops a running one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindtune.controller.trials.early_stop import Progress, possible_trial, stop_reason
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.facts import StudyFacts
from mindtune.search.halving import Bar, rungs
from mindtune.search.noise import part_noise
from mindtune.search.scoring import MeasuredTrial, score

__all__ = ["best_bar", "stopped_early"]


def best_bar(trials: Sequence[SimulatedTrial], facts: StudyFacts) -> Bar | None:
    """Return what a running trial is compared with; None: no trial was measured step by step."""
    known = [trial for trial in trials if trial.outcome == "ok" and trial.step_times_s]
    if not known:
        return None
    best = max(known, key=lambda trial: trial.value or 0.0)
    scored = score(MeasuredTrial(step_time_s=best.step_times_s, bad_steps=sum(best.is_bad)), facts)
    noise = part_noise([trial.step_times_s for trial in known])
    return Bar(
        step_time_s=scored.median_step_time_s,
        stability=scored.stability,
        mfu_exponent=1.0,
        stability_exponent=1.0,
        noise=noise or 0.0,
    )


def stopped_early(trial: SimulatedTrial, bar: Bar | None, facts: StudyFacts) -> SimulatedTrial:
    """Return a trial as it ends under the study's rule: stopped, or as it is."""
    if bar is None or trial.outcome != "ok":
        return trial
    planned = len(trial.step_times_s)
    for rung in rungs(planned):
        seen = Progress(
            steps=rung, step_time_s=trial.step_times_s[:rung], is_bad=trial.is_bad[:rung]
        )
        if stop_reason(seen, bar, measure_steps=planned) is None:
            continue
        possible = possible_trial(seen, measure_steps=planned)
        return replace(
            trial,
            outcome="pruned",
            value=None if possible is None else score(possible, facts).value,
            wall_s=trial.wall_s - sum(trial.step_times_s[rung:]),
        )
    return trial
