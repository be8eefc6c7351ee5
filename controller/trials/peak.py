"""The peak that a study's MFU is taken of: found once, kept with its source."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from mindtune.controller.contract import Document, StudyFile, read_document, write_json
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.calibrate import CalibrationError, measure_host
from mindtune.controller.metrics.peaks import look_up_peak, shared_peak
from mindtune.controller.trials.study_folder import StudyFolder

__all__ = ["PeakFile", "needs_measuring", "resolve_peak"]

_HOST = "cpu"
_MEASURE = "measure"


class PeakFile(Document):
    """peak.json in a study's folder."""

    FILE: ClassVar[str] = "peak.json"

    flops_per_device: float | None = Field(default=None, gt=0)
    """Dense peak of one device in FLOP/s; null: unknown, then values are relative to the base."""
    precision: str
    device: str
    """Name of what was looked up or measured."""
    source: str
    """Where the figure comes from, or why there is none."""
    setting: str
    """cluster.peak_flops as the study file has it."""
    num_devices: int = Field(ge=1)
    spread: float | None = None
    """Measured only: interquartile range of the repeats over their median."""


def resolve_peak(study: StudyFile, folder: StudyFolder) -> PeakFile:
    """Return the peak of one device, from the folder if it was found there before.

    A peak that is measured on the host is that of all its cores together, so the ranks that share
    it divide it (see `peaks.shared_peak`).

    Raises:
        ConfigError: if it is to be measured and cannot be.
    """
    known = _stored(study, folder)
    if known is not None:
        return known
    peak = _find(study)
    write_json(folder.peak, peak)
    return peak


def needs_measuring(study: StudyFile, folder: StudyFolder) -> bool:
    """Tell whether `resolve_peak` will measure this host, which takes 10 to 20 s."""
    wanted = study.cluster.peak_flops == _MEASURE and study.model is not None
    return wanted and _stored(study, folder) is None


def _stored(study: StudyFile, folder: StudyFolder) -> PeakFile | None:
    if not folder.peak.exists():
        return None
    known = read_document(PeakFile, folder.peak)
    cluster = study.cluster
    wanted = (str(cluster.peak_flops), study.training.precision, cluster.num_devices)
    return known if (known.setting, known.precision, known.num_devices) == wanted else None


def _find(study: StudyFile) -> PeakFile:
    cluster, precision = study.cluster, study.training.precision
    setting = str(cluster.peak_flops)
    common = {"precision": precision, "setting": setting, "num_devices": cluster.num_devices}
    if isinstance(cluster.peak_flops, float):
        return PeakFile(
            flops_per_device=cluster.peak_flops,
            device=cluster.device,
            source="the study file",
            **common,
        )
    if cluster.peak_flops is None:
        peak, reason = look_up_peak(cluster.device, precision)
        flops = None if peak is None else peak.flops
        name = cluster.device if peak is None else peak.device
        return PeakFile(flops_per_device=flops, device=name, source=reason, **common)
    if study.model is None:
        source = "not measured: without a model in the study file there is no MFU"
        return PeakFile(device=cluster.device, source=source, **common)
    if cluster.device != _HOST:
        raise ConfigError(
            "cluster.peak_flops: measure takes the peak of this host, so cluster.device must be "
            f"cpu, but got {cluster.device!r}; give a number or leave it out."
        )
    if study.trial.launcher == "slurm":
        raise ConfigError(
            "cluster.peak_flops: measure takes the peak of this host, but trial.launcher slurm "
            "runs the trials on others; give the number that `srun mindtune doctor --measure` "
            "prints there."
        )
    try:
        measured = measure_host((precision,)).peaks
    except CalibrationError as error:
        raise ConfigError(
            f"cluster.peak_flops: measure needs a working calibration, but {error} Give a number "
            "instead, or see `mindtune doctor`."
        ) from None
    if not measured:
        raise ConfigError(
            f"cluster.peak_flops: measure needs a matrix kernel for {precision}, but this host "
            "has none; give a number or another training.precision."
        )
    peak = shared_peak(measured[0], cluster.num_devices)
    return PeakFile(
        flops_per_device=peak.flops,
        device=peak.device,
        source=peak.source,
        spread=peak.spread,
        **common,
    )
