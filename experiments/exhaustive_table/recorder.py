"""Record the table: every config that could run, in an order of its own, then the best again.

The order is drawn once, so that a machine which grows slower in the meantime does not make one
knob look slow. A config counts as measured under the same identity on the same machine, with
little other work beside it; everything else is measured when the recorder is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.identity import study_identity
from mindtune.controller.trials.measure import Launch, Measurer
from mindtune.controller.trials.peak import resolve_peak
from mindtune.controller.trials.scores import Scorer
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_setup import StudySetup, load_study
from mindtune.experiments.exhaustive_table.problem import configs_of
from mindtune.experiments.exhaustive_table.rows import (
    MOST_OTHER_WORK,
    Row,
    append_row,
    read_rows,
)
from mindtune.experiments.provenance import OtherWork, Provenance, provenance
from mindtune.search.knobs import Config

__all__ = ["TABLE", "Progress", "Recorder", "open_recorder"]

TABLE = "table.csv"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A row that was recorded just now."""

    row: Row
    counts: bool
    """Whether the machine had little else to do; otherwise it is measured again."""
    done: int
    planned: int


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """A table that is being recorded."""

    setup: StudySetup
    folder: StudyFolder
    measurer: Measurer
    scorer: Scorer
    provenance: Provenance
    configs: list[Config]
    leaders: int
    """How many of the best are measured again."""
    repeats: int
    """How often."""
    most_other_work: float
    """Share of the machine that other programs may take during a measurement."""

    @property
    def table(self) -> Path:
        """The file."""
        return self.folder.root / TABLE

    def record(
        self, *, limit: int | None = None, tell: Callable[[Progress], None] | None = None
    ) -> int:
        """Measure what is missing; return how many measurements are still missing.

        Args:
            limit: Most measurements to make now; None: all.
            tell: Called after each.
        """
        made = 0
        with self.folder.locked():
            tried: set[tuple[int, int]] = set()
            while limit is None or made < limit:
                key = next((one for one in self.missing() if one not in tried), None)
                if key is None or key[0] < 0:
                    break
                tried.add(key)
                row = self._measure(*key)
                made += 1
                if row.outcome == "interrupted":  # says nothing about the config
                    continue
                append_row(self.table, row)
                if tell is not None:
                    planned = len(self.configs) + self.leaders * self.repeats
                    tell(
                        Progress(
                            row=row,
                            counts=row.others_share <= self.most_other_work,
                            done=planned - len(self.missing()),
                            planned=planned,
                        )
                    )
        return len(self.missing())

    def rows(self) -> dict[tuple[int, int], Row]:
        """Return the rows that count, by config and repeat."""
        return {
            (row.number, row.repeat): row
            for row in read_rows(self.table)
            if row.conditions == self._conditions and row.others_share <= self.most_other_work
        }

    @property
    def _conditions(self) -> tuple[str, str, float]:
        own = self.provenance
        return self.measurer.identity.combined, own.processor, own.cores

    def missing(self) -> list[tuple[int, int]]:
        """Return config and repeat of what is to be measured, in its order.

        While the best are not known, numbers below 0 stand for them.
        """
        known = self.rows()
        first = [(number, 0) for number in range(len(self.configs))]
        Random(self.setup.study.study.seed).shuffle(first)
        missing = [key for key in first if key not in known]
        if missing:
            best = [-1 - index for index in range(self.leaders)]
        else:
            values = {number: row.value or 0.0 for (number, repeat), row in known.items()
                      if repeat == 0 and row.outcome == "ok"}  # fmt: skip
            best = sorted(values, key=lambda number: -values[number])[: self.leaders]
        again = [(number, repeat) for repeat in range(1, self.repeats + 1) for number in best]
        return missing + [key for key in again if key not in known]

    def _measure(self, number: int, repeat: int) -> Row:
        config = self.configs[number]
        plan = self.measurer.plan(number, repeat)
        work = OtherWork()
        launched = self.measurer.measure(config, plan)
        return self._row(launched, config, work.share())

    def _row(self, launched: Launch, config: Config, others_share: float) -> Row:
        seen, measured = self.scorer.measurement(launched), launched.measured
        peak_flops = self.scorer.facts.cluster.peak_flops
        identity, processor, cores = self._conditions
        return Row(
            number=launched.number,
            repeat=launched.repeat,
            config=config,
            outcome=seen.outcome,
            value=seen.value,
            mfu=seen.mfu,
            stability=seen.stability,
            step_times_s=() if measured is None else measured.step_time_s,
            bad_steps=0 if measured is None else measured.bad_steps,
            peak_memory_bytes=seen.peak_memory_bytes,
            final_loss=seen.final_loss,
            wall_s=seen.wall_s,
            others_share=others_share,
            peak_flops=peak_flops,
            identity=identity,
            processor=processor,
            cores=cores,
            mindspore=self.provenance.mindspore,
            revision=self.provenance.revision,
            date=self.provenance.date,
            message=seen.message,
        )


def open_recorder(
    study_file: Path,
    out: Path,
    *,
    leaders: int = 20,
    repeats: int = 2,
    most_other_work: float = MOST_OTHER_WORK,
    measure_steps: int | None = None,
) -> Recorder:
    """Return the recorder of a study, new or resumed; the peak is measured if it has to be.

    Args:
        study_file: The study; its number of trials and repeats do not matter here.
        out: Folder of table and trials.
        leaders: See `Recorder`, as the next two.
        repeats: As above.
        most_other_work: As above.
        measure_steps: Measured steps of a trial; None: as the study file says.

    Raises:
        ConfigError: if the study file or the folder cannot be used, or a number makes no sense.
    """
    for name, number in (("leaders", leaders), ("repeats", repeats)):
        if number < 0:
            raise ConfigError(f"{name} must be 0 or more, but got {number}.")
    if measure_steps is not None and measure_steps < 1:
        raise ConfigError(f"measure_steps must be 1 or more, but got {measure_steps}.")
    if not 0.0 <= most_other_work <= 1.0:
        raise ConfigError(f"most_other_work must lie in [0, 1], but got {most_other_work:g}.")
    setup, folder = load_study(study_file), StudyFolder(out)
    if measure_steps is not None:
        trial = setup.study.trial.model_copy(update={"measure_steps": measure_steps})
        setup = replace(setup, study=setup.study.model_copy(update={"trial": trial}))
    folder.check_writable()
    peak = resolve_peak(setup.study, folder)
    space = setup.with_peak(peak.flops_per_device)
    return Recorder(
        setup=setup,
        folder=folder,
        measurer=Measurer(setup, folder, study_identity(setup)),
        scorer=Scorer(setup.study, space.facts),
        provenance=provenance(),
        configs=configs_of(setup.space),
        leaders=leaders,
        repeats=repeats,
        most_other_work=most_other_work,
    )
