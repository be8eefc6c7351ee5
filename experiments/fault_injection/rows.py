"""The measured rows: one line of `rows.jsonl` per run that ended in good order.

The file is append-only. A row is written as soon as its run has ended, so that an experiment may
be stopped at any time and goes on where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mindtune.controller.contract import Document, Number
from mindtune.experiments.provenance import Provenance
from mindtune.experiments.row_file import append_row, read_keyed_rows

__all__ = ["FaultRow", "RowKey", "append_row", "read_rows"]

RowKey = tuple[str, str, int]
"""Fault, guard, seed."""


class FaultRow(Document):
    """What one run of one case, one guard and one seed came to."""

    FILE: ClassVar[str] = "rows.jsonl"

    fault: str
    guard: str
    seed: int = Field(ge=0)
    config_hash: str
    """Of the overrides and the mode: two rows with equal keys are comparable iff it is equal."""
    outcome: str
    """Of the run's result.json: ok, stopped, non_finite, or what the fault itself leads to."""
    message: str = ""
    steps: int = Field(ge=1)
    """Optimizer steps attempted."""
    samples: int = Field(ge=1)
    """Samples that were trained on."""
    final_loss: Number | None
    """Mean training loss of the last tenth of the steps, in nats per byte."""
    validation_loss: Number | None
    """Loss on the held-out text when training ended; None where a policy ended it before."""
    updates_skipped: int = Field(ge=0)
    """Optimizer steps that left the weights as they were."""
    steps_above: int = Field(ge=0)
    """Steps at a loss at least 15 % above one that the run had reached before."""
    samples_lost: int = Field(ge=0)
    """Samples of the steps that were lost in either way."""
    actions: dict[str, int]
    """Granted actions by kind."""
    undone: int = Field(ge=0)
    """Actions that the arbiter took back."""
    proposed: dict[str, int]
    """Actions by kind that were only observed."""
    advice: tuple[str, ...]
    """Ids of the advices given."""
    fault_step: int | None
    """Step from which the fault acts; None: there is no fault."""
    first_action_step: int | None
    """Step whose signals led to the first action, granted or observed, but for moves of the skip
    threshold."""
    findings: dict[str, int]
    """Incidents by kind of finding."""
    detected_step: int | None = None
    """Step whose signals led to the first finding that names the fault; None: none does."""
    other_findings: dict[str, int] = Field(default_factory=dict)
    """Other kinds of findings from a warning up, with the first step of each."""
    false_actions: dict[str, int] = Field(default_factory=dict)
    """Granted actions, by kind, that the fault does not justify, or that came before
    it; a moved skip threshold counts by the updates that it skipped outside of the fault."""
    steps_rewound: int = Field(default=0, ge=0)
    """Steps by which rewinds went back, all together."""
    final_batch_size: int | None
    """Samples per optimizer step at the end."""
    tokens_per_s: float | None
    """Over all steps without a compile, data wait included."""
    wall_s: float = Field(ge=0)
    """Of the whole process, start and compile included."""
    load_1m: float | None
    """The machine's load when the run began."""
    others_busy: float | None = Field(default=None, ge=0, le=1)
    """Share of the cores that other processes took during the run: above a tenth, times and what
    is decided by them are not to be trusted."""
    measured: Provenance

    @property
    def key(self) -> RowKey:
        """What no two rows of one file share."""
        return (self.fault, self.guard, self.seed)

    @property
    def steps_lost(self) -> int:
        """Updates skipped, steps spent above a loss reached before, and steps taken back."""
        return self.updates_skipped + self.steps_above + self.steps_rewound

    @property
    def detection_delay(self) -> int | None:
        """Steps from the fault's begin to the first finding that names it; None without either."""
        if self.fault_step is None or self.detected_step is None:
            return None
        return self.detected_step - self.fault_step

    @property
    def stop_delay(self) -> int | None:
        """Steps from the fault's begin to the stop by a policy; None without either."""
        if self.fault_step is None or self.outcome != "stopped":
            return None
        return self.steps - self.fault_step


def read_rows(path: Path) -> dict[RowKey, FaultRow]:
    """Return the rows of a file by key; see `read_keyed_rows`."""
    return read_keyed_rows(path, FaultRow, lambda row: row.key)
