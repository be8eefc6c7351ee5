"""What a running study knows, and its summary.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindtune.controller.contract import RejectedRule, write_json
from mindtune.controller.trials.conclusions import (
    ConfigKey,
    ablation,
    kept_steps,
    speed_front,
    trial_noise,
)
from mindtune.controller.trials.confirm import BASE, Verdict
from mindtune.controller.trials.measure import Launch
from mindtune.controller.trials.scores import Scorer
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_setup import StudySetup
from mindtune.controller.trials.summary import (
    Measurement,
    StudySummary,
    TrialSummary,
    confirming,
)
from mindtune.search.constraints import SpaceReport
from mindtune.search.convergence import ConvergenceVerdict
from mindtune.search.halving import Bar
from mindtune.search.knobs import Config
from mindtune.search.noise import part_noise
from mindtune.search.scoring import best_by

__all__ = ["StudyState"]


@dataclass
class StudyState:
    """The measurements of a study, by config."""

    setup: StudySetup
    folder: StudyFolder
    scorer: Scorer
    report: SpaceReport
    planned: int
    """Configs to measure."""
    configs: dict[int, Config] = field(default_factory=dict)
    launches: dict[int, list[Launch]] = field(default_factory=dict)
    """Number of a config -> its launches, the search's own first."""
    leaders: tuple[int, ...] = ()
    verdicts: Mapping[int, ConvergenceVerdict] = field(default_factory=dict)
    final: Verdict | None = None
    search_ended: str = ""
    """Why no further config is tried; empty: the search goes on."""
    hardware: str | None = None
    """What all trials run on; None: each tells it, or it is not known."""
    ablated: dict[ConfigKey, float] = field(default_factory=dict)
    """Values of configs that were measured for the ablation alone."""

    def add(self, config: Config, launch: Launch) -> Measurement:
        """Take over a measurement and return it with its value."""
        self.configs[launch.number] = config
        known = self.launches.setdefault(launch.number, [])
        known[:] = [other for other in known if other.repeat != launch.repeat]
        known.append(launch)
        known.sort(key=lambda entry: entry.repeat)
        return self.scorer.measurement(launch)

    def told_hardware(self) -> set[str]:
        """Return what trials ran on that were told by their nodes."""
        told = (
            launch.outcome.record.hardware for known in self.launches.values() for launch in known
        )
        return {node for text in told for node in (text or "").split("; ") if node}

    def drop(self, number: int) -> None:
        """Forget what the search measured of a config: it does not count."""
        kept = [launch for launch in self.launches.pop(number, []) if launch.repeat > 0]
        if kept:
            self.launches[number] = kept

    def measurements(self, number: int) -> list[Measurement]:
        """Return all measurements of a config."""
        return [self.scorer.measurement(launch) for launch in self.launches.get(number, [])]

    def best(self) -> Measurement | None:
        """Return the best of the search's own measurements."""
        number = self.best_number()
        return None if number is None else self.measurements(number)[0]

    def bar(self) -> Bar | None:
        """Return what a running trial is compared with; None: nothing is known to be good."""
        best = self.best()
        if self.setup.study.score.pareto:
            return None  # what is slow may be steady
        return (
            None if best is None else self.scorer.bar(best, noise=part_noise(self._step_times()))
        )

    def _step_times(self) -> list[Sequence[float]]:
        """Return the step times of every launch that ended ok."""
        return [
            launch.measured.step_time_s
            for launches in self.launches.values()
            for launch in launches
            if launch.measured is not None and launch.outcome.record.outcome == "ok"
        ]

    def best_number(self) -> int | None:
        """Return the config with the best value of the search."""
        rows = []
        for number in self.launches:
            first = self.measurements(number)[0]
            if first.repeat == 0 and first.outcome == "ok":
                rows.append({"number": number, "value": first.value})
        best = best_by("value", rows)
        return None if best is None else int(best["number"] or 0)

    def ranked(self) -> list[int]:
        """Return the configs but the base's that ended ok in the search, best first."""
        return self._by_value("ok")

    def candidates(self) -> list[int]:
        """Return what may be confirmed where no leader can win, best first.

        With the configs that were stopped early, at the value that they had until then.
        """
        return self._by_value("ok", "pruned")

    def _by_value(self, *outcomes: str) -> list[int]:
        values = {}
        for number in self.launches:
            first = self.measurements(number)[0]
            if number != BASE and first.outcome in outcomes and first.value:
                values[number] = first.value
        return sorted(values, key=lambda number: (-values[number], number))

    def confirming(self) -> dict[int, list[Measurement]]:
        """Return the confirming measurements of base and leaders."""
        return {
            number: [entry for entry in self.measurements(number) if entry.repeat > 0]
            for number in (BASE, *self.leaders)
        }

    def summary(self) -> StudySummary:
        """Return what is known now."""
        winner, reason = self.best_number(), "the best so far, not confirmed"
        if self.final is not None:
            winner, reason = self.final.winner, self.final.reason
        trials = [self._trial(number) for number in sorted(self.launches)]
        noise = trial_noise(trials, self._step_times())
        return StudySummary(
            study=self.setup.study.study.name,
            complete=self.final is not None,
            objective=self.scorer.objective,
            hardware=self.hardware or "; ".join(sorted(self.told_hardware())) or None,
            planned=self.planned,
            total=self.report.total,
            feasible=self.report.feasible,
            rejected=[
                RejectedRule(rule=r.rule, count=r.count, reason=r.reason, example=r.example)
                for r in self.report.rejected
            ],
            trials=trials,
            leaders=list(self.leaders),
            winner=winner,
            reason=reason if winner is not None or self.final is not None else "",
            search_ended=self.search_ended,
            front=speed_front(trials),
            kept=kept_steps(trials, self._versions(), noise),
            noise=noise,
            ablation=ablation(
                self.configs, trials, base=BASE, winner=winner, noise=noise, extra=self.ablated
            ),
        )

    def _versions(self) -> dict[int, str]:
        return {
            number: launches[0].outcome.record.config_hash or ""
            for number, launches in self.launches.items()
        }

    def save(self) -> None:
        """Rewrite summary.json."""
        write_json(self.folder.summary, self.summary())

    def _trial(self, number: int) -> TrialSummary:
        measurements = self.measurements(number)
        verdict = self.verdicts.get(number)
        first = measurements[0]
        repeats = [entry.value for entry in confirming(measurements) if entry.value]
        return TrialSummary(
            number=number,
            knobs=self.setup.knobs(self.configs[number]),
            outcome=first.outcome,
            message=first.message,
            value=statistics.median(repeats) if repeats else first.value,
            interval=(min(repeats), max(repeats)) if repeats else None,
            confirmed=bool(repeats),
            converges=None if verdict is None else verdict.ok,
            convergence="" if verdict is None else verdict.reason,
            measurements=measurements,
        )
