"""One log, several of one run one after another, or those of several ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mindtune.controller.contract import (
    ProfileRecord,
    RunResult,
    parse,
    read_document,
    read_json,
)
from mindtune.controller.contract.conditions import RunConditions
from mindtune.controller.contract.fault_plan import PLANTED_FAULTS
from mindtune.controller.records import (
    RunFolder,
    read_decisions,
    read_model_signals,
    read_profiles,
)
from mindtune.controller.records.log_readers import LogStream, Names, open_several
from mindtune.controller.replay.ranks import Ranks
from mindtune.policies.decisions import Advise
from mindtune.policies.diagnosis import RunContext
from mindtune.policies.findings import FindingKind
from mindtune.policies.signals import Observation

__all__ = ["LogSet", "open_logs"]


_TOLD = 4
"""Actions of a run that are named."""


class LogSet:
    """The observations of one run, from one log or more; may be iterated once.

    Args:
        streams: The logs, at least one.
        ranks: Rank of each log where they are of the same steps; None: they follow each other.
        context: What other records of the run tell.
        notes: What a reader should know of how the logs were taken.
    """

    def __init__(
        self,
        streams: Sequence[LogStream],
        *,
        ranks: Sequence[int] | None = None,
        context: RunContext | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.streams = tuple(streams)
        self.notes = list(notes)
        self._context = RunContext() if context is None else context
        self._ranks = None if ranks is None else Ranks(ranks)

    @classmethod
    def of(cls, stream: LogStream) -> LogSet:
        """Return the set of one log."""
        return cls((stream,))

    @property
    def name(self) -> str:
        """Path of the log, or of the first one and how many there are."""
        more = len(self.streams) - 1
        return f"{self.streams[0].path}" + (f" and {more} more" if more else "")

    @property
    def format(self) -> str:
        """Names of the formats."""
        return ", ".join(dict.fromkeys(stream.format.name for stream in self.streams))

    @property
    def records(self) -> int:
        """Data lines understood so far, in all logs."""
        return sum(stream.records for stream in self.streams)

    @property
    def is_cut(self) -> bool:
        """Whether a compressed log broke off."""
        return any(stream.is_cut for stream in self.streams)

    def how_read(self) -> list[str]:
        """Say how sure the format is and what was not understood; complete after the last step.

        Of several logs each thing is said once.
        """
        return list(dict.fromkeys(note for stream in self.streams for note in stream.notes()))

    def context(self) -> RunContext:
        """Return what other records and the logs' ends tell, and the ranks of each other."""
        context = self._context
        failures = [stream.failure for stream in self.streams if stream.failure is not None]
        if context.outcome is None and failures:
            worst = min(failures, key=lambda failure: failure.order)
            context = replace(
                context,
                outcome="timeout" if worst.kind == "hang" else worst.kind,
                message=worst.text,
                hung=context.hung or worst.kind == "hang",
            )
        ranks = self._ranks
        if ranks is None:
            return context
        return replace(
            context,
            num_ranks=len(self.streams),
            first_non_finite=ranks.first_non_finite(),
            idle_ranks=ranks.idle(),
        )

    def __iter__(self) -> Iterator[Observation]:
        """Yield one observation per step and segment.

        Raises:
            ConfigError: a file cannot be read.
        """
        if self._ranks is not None:
            return self._ranks.merged(self.streams)
        if len(self.streams) == 1:
            return iter(self.streams[0])
        return self._one_after_another()

    def _one_after_another(self) -> Iterator[Observation]:
        """Number the segments on: a log that goes on where the one before ended is no restart."""
        run, last_step = 0, -1
        for stream in self.streams:
            of_log: int | None = None
            for observation in stream:
                number = observation.run or 0
                goes_back = observation.step <= last_step
                run += int(goes_back if of_log is None else number != of_log)
                of_log = number
                last_step = observation.step
                yield replace(observation, run=run)


def open_logs(
    paths: Sequence[Path],
    format: str = "auto",  # noqa: A002 - the option's word
    names: Names | None = None,
) -> LogSet:
    """Return the observations of a run, from its log, its logs or its folder.

    Several logs are those of ranks if their names differ in a rank's number (worker_0.log,
    worker_1.log) or their first lines are of the same step and minute; otherwise they are taken
    one after another.

    Args:
        paths: Logs, or one folder: of a run of ours, a checkpoint of Hugging Face's Trainer, or
            the log folder of msrun or MindFormers; `-` is standard input.
        format: Name of a reader, or `auto`.
        names: What the log calls the signals; None: what is known.

    Raises:
        ConfigError: a file is missing, or no reader understands it.
    """
    logs = open_several(paths, format, names)
    files = [path for stream in logs.streams for path in stream.paths]
    told = []
    if logs.ranks is not None:
        told = [f"{len(files)} logs were read side by side, as ranks of one run: {_names(files)}."]
    elif len(files) > 1:
        told = [f"{len(files)} logs were read one after another, as one run: {_names(files)}."]
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    context, ending = (RunContext(), []) if folder is None else _records(folder)
    return LogSet(
        logs.streams,
        ranks=logs.ranks,
        context=context,
        notes=[*told, *ending, *logs.notes],
    )


def _names(paths: Sequence[Path]) -> str:
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"


def _records(folder: Path) -> tuple[RunContext, list[str]]:
    """Return what the other records of a run tell, and what a reader should know of them."""
    records = RunFolder(folder)
    outcome, message, hung = None, "", False
    notes = []
    if records.result.exists():
        content = read_json(records.result)
        if isinstance(content, dict) and {"steps", "wall_s"} <= set(content):
            result = parse(RunResult, content, source=str(records.result))
            outcome, message = result.outcome, result.message
            hung = FindingKind.HANG.value in result.findings
        elif isinstance(content, dict):
            outcome, message = content.get("outcome"), str(content.get("message", ""))
    samples = read_model_signals(records.model_signals)
    has_attention = None
    if samples:
        has_attention = any(sample.attention_entropy is not None for sample in samples)
    if outcome is not None:
        notes.append(f"the run's own record says that it ended {outcome!r}. {message}".rstrip())
    granted = [entry for entry in read_decisions(records.decisions) if entry.verdict == "granted"]
    acted = [entry for entry in granted if entry.action != Advise.__name__]
    notes += [entry.reason for entry in granted if entry.requested == PLANTED_FAULTS]
    if acted:
        steps = ", ".join(f"{entry.action} in step {entry.step}" for entry in acted[:_TOLD])
        more = f" and {len(acted) - _TOLD} more" if len(acted) > _TOLD else ""
        notes.append(f"policies acted in this run ({steps}{more}): its signals show the effect.")
    conditions_file = folder / RunConditions.FILE
    model = None
    if conditions_file.exists():
        model = read_document(RunConditions, conditions_file).model
    profiles = read_profiles(records.profiles)
    profile = profiles[-1] if profiles else None
    context = RunContext(
        outcome=outcome if isinstance(outcome, str) else None,
        message=message,
        hung=hung,
        every_step=True if records.decisions.exists() else None,
        has_attention=has_attention,
        vocab_size=None if model is None else model.vocab_size,
        communication_share=None if profile is None else profile.communication_share,
        communication_overlap=None if profile is None else profile.communication_overlap,
        host_share=None if profile is None else profile.host_share,
        profiled="" if profile is None else _profiled(profile),
    )
    return context, notes


def _profiled(profile: ProfileRecord) -> str:
    return f"the profiled steps {profile.first_step} to {profile.last_step}"
