"""Opens what figures can be made of: a run's folder, a trial's, or a log of any known format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mindtune.controller.contract import (
    KnobsFile,
    ProfileRecord,
    RunResult,
    StudyFile,
    TrialRecord,
    TrialResult,
    parse,
    read_document,
    read_json,
    read_rows,
)
from mindtune.controller.contract.conditions import RunConditions
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.peaks import look_up_peak
from mindtune.controller.records import RunFolder, read_decisions, read_profiles
from mindtune.controller.records.log_readers import Names
from mindtune.controller.replay import open_logs
from mindtune.controller.trials.peak import PeakFile
from mindtune.policies.signals import Observation

__all__ = ["RunSource", "open_source", "study_conditions"]

_STUDY = "study.yaml"
_HANG = "hang-"


@dataclass(frozen=True)
class RunSource:
    """A run, to be read once."""

    name: str
    format: str
    """`run`, `trial`, or the name of a log's reader."""
    observations: Iterable[Observation]
    conditions: RunConditions = field(default_factory=RunConditions)
    outcome: str | None = None
    peak_memory_bytes: int | None = None
    reserved_bytes: int | None = None
    """Peak that the framework's allocator had taken from the device."""
    timeouts: int | None = None
    profiles: tuple[ProfileRecord, ...] = ()
    """What profiler windows showed."""

    @property
    def is_log(self) -> bool:
        """Whether the steps come from another program's log, which may leave some out."""
        return self.format not in ("run", "trial")


def open_source(
    path: Path,
    *,
    format: str = "auto",  # noqa: A002 - its own word
    names: Names | None = None,
) -> RunSource:
    """Return what lies at a path.

    Args:
        path: Folder of a run or a trial; or a log, or a folder with the logs of ranks.
        format: Name of a log reader, or `auto`.
        names: What a log calls the signals; None: what is known.

    Raises:
        ConfigError: There is nothing that can be read.
    """
    folder = RunFolder(path)
    own_files = (folder.signals, folder.result, path / KnobsFile.FILE, path / TrialRecord.FILE)
    if not any(file.exists() for file in own_files):
        logs = open_logs([path], format, names)
        return RunSource(path.resolve().name, logs.format, logs)
    conditions = _conditions(path)
    record_file = path / TrialRecord.FILE
    plan = _knobs(path)
    content = read_json(folder.result) if folder.result.exists() else None
    # A trial may be any program, which need not leave more than its outcome.
    own = isinstance(content, dict) and bool({"steps", "wall_s"} & set(content))
    in_trial = record_file.exists() or (plan is not None and plan.trial is not None)
    if in_trial or (content is not None and not own):
        return _trial(folder, conditions)
    result = None if content is None else parse(RunResult, content, source=str(folder.result))
    return RunSource(
        path.resolve().name,
        "run",
        _rows(folder.signals),
        conditions,
        outcome=None if result is None else result.outcome,
        peak_memory_bytes=None if result is None else result.peak_memory_bytes,
        reserved_bytes=None if result is None else result.peak_reserved_bytes,
        timeouts=_num_hangs(folder),
        profiles=tuple(read_profiles(folder.profiles)),
    )


def _trial(folder: RunFolder, conditions: RunConditions) -> RunSource:
    path = folder.path
    record_file = path / TrialRecord.FILE
    record = read_document(TrialRecord, record_file) if record_file.exists() else None
    result = None
    if folder.result.exists():
        content = read_json(folder.result)
        result = parse(TrialResult, content, source=str(folder.result))
    told: TrialRecord | TrialResult | None = record or result
    outcome: str | None = None if told is None else told.outcome
    peaks = [part.peak_memory_bytes for part in (record, result) if part is not None]
    steps: Iterable[Observation]
    if folder.signals.exists():
        steps = _rows(folder.signals)
    elif result is not None:
        steps = list(_measured(result))
    else:
        raise ConfigError(
            f"{path} must hold a signals.csv or a result.json, but this trial left neither."
        )
    return RunSource(
        "/".join(path.resolve().parts[-2:]),
        "trial",
        steps,
        conditions,
        outcome=outcome,
        peak_memory_bytes=max((peak for peak in peaks if peak), default=None),
        timeouts=int(outcome == "timeout"),
    )


def _rows(signals: Path) -> Iterator[Observation]:
    """Yield the rows of a signal table as they are read."""
    if not signals.is_file():
        raise ConfigError(f"{signals} must exist, but there is no such file.")

    def rows() -> Iterator[Observation]:
        try:
            with signals.open(encoding="utf-8", newline="") as lines:
                for row in read_rows(lines, source=str(signals)):
                    yield row.observation
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{signals} must be a readable text file, but: {error}.") from None

    return rows()


def _measured(result: TrialResult) -> Iterator[Observation]:
    """Yield the measured steps of a trial that kept no table."""
    times = result.step_times()
    columns = {
        name: value
        for name in ("loss", "grad_norm", "overflow", "update_skipped")
        if isinstance(value := getattr(result, name), list)
    }
    tokens = None if result.tokens_per_step is None else round(result.tokens_per_step)
    samples = None if result.samples_per_step is None else round(result.samples_per_step)
    for index in range(max(len(times), *(len(values) for values in columns.values()), 0)):
        signals = {
            name: float(values[index]) for name, values in columns.items() if index < len(values)
        }
        yield Observation(
            step=index + 1,
            phase="train",
            step_time_s=times[index] if index < len(times) else None,
            tokens=tokens,
            global_batch_size=samples,
            **signals,  # type: ignore[arg-type] # the four names above
        )


def _num_hangs(folder: RunFolder) -> int:
    """Return how often the run fell silent, as far as it could still say so."""
    return sum(
        isinstance(record.requested, str) and record.requested.startswith(_HANG)
        for record in read_decisions(folder.decisions)
    )


def _knobs(path: Path) -> KnobsFile | None:
    file = path / KnobsFile.FILE
    return read_document(KnobsFile, file) if file.exists() else None


def _conditions(path: Path) -> RunConditions:
    """Return what is known of a folder's run: its own words first, then its study's."""
    file = path / RunConditions.FILE
    own = read_document(RunConditions, file) if file.exists() else RunConditions()
    known: dict[str, object] = {}
    root = path.resolve()
    if len(root.parts) > 4 and root.parents[1].name == "trials":
        study_file = root.parents[2] / _STUDY
        if study_file.is_file():
            study = read_document(StudyFile, study_file)
            known = _told(study_conditions(study, study_file.parent))
    knobs = _knobs(path)
    if knobs is not None:
        if "recompute" in knobs.knobs:  # else it is as the base config has it
            known["recompute"] = str(knobs.knobs["recompute"])
        if knobs.trial is not None:
            known["seed"] = knobs.trial.seed
    return RunConditions.model_validate({**known, **_told(own)})


def _told(conditions: RunConditions) -> dict[str, object]:
    told = conditions.model_dump(exclude_none=True, exclude={"schema_version"})
    return {name: value for name, value in told.items() if value != {}}


def study_conditions(study: StudyFile, folder: Path | None = None) -> RunConditions:
    """Return what a study file says about the runs of its configs.

    Args:
        study: The study.
        folder: Folder of a started study, which keeps the peak that was measured.
    """
    cluster, precision = study.cluster, study.training.precision
    peak, source = None, None
    stored = None if folder is None else folder / PeakFile.FILE
    if stored is not None and stored.is_file():
        measured = read_document(PeakFile, stored)
        peak, source = measured.flops_per_device, measured.source
    elif isinstance(cluster.peak_flops, float):
        peak, source = cluster.peak_flops, "the study file"
    elif cluster.peak_flops is None:
        looked_up = look_up_peak(cluster.device, precision)
        peak = None if looked_up.peak is None else looked_up.peak.flops
        source = looked_up.reason
    else:
        source = "the study measures it when it is searched, and has not been"
    return RunConditions(
        hardware=None if cluster.device.lower() == "cpu" else cluster.device,
        num_devices=cluster.num_devices,
        precision=precision,
        model=study.model,
        peak_flops=peak,
        peak_source=source,
    )
