"""A measurement as an attribute of its trial, so that every worker and the search know it.

What a trial measured goes with the study's storage; its logs stay in the folder of who ran it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindtune.controller.contract import TrialPlan, TrialRecord, TrialResult, write_json
from mindtune.controller.trials.measure import Launch
from mindtune.controller.trials.outcome import TrialOutcome
from mindtune.controller.trials.summary import Measurement
from mindtune.search.attributes import MEMORY, REASON, STEP_TIME, WALL
from mindtune.search.errors import SearchError
from mindtune.search.scoring import MeasuredTrial

__all__ = ["LAUNCH", "keep_files", "launch_of", "to_attribute", "trial_attributes"]

LAUNCH = "launch"
"""User attribute of a trial: its trial.json and result.json, and what its value is made of."""


def to_attribute(launch: Launch) -> dict[str, Any]:
    """Return a measurement as JSON values."""
    record = launch.outcome.record
    if record.measured_in is None:
        where = f"{socket.gethostname()}:{launch.folder.resolve()}"
        record = record.model_copy(update={"measured_in": where})
    result, measured = launch.outcome.result, launch.measured
    return {
        "record": record.to_plain(),
        "result": None if result is None else result.to_plain(),
        "measured": None if measured is None else asdict(measured),
    }


def trial_attributes(launch: Launch, measurement: Measurement) -> dict[str, Any]:
    """Return all that is kept with a trial, `LAUNCH` and what the search learns from it."""
    # What ended above the memory limit was measured to its end as well.
    is_whole = measurement.outcome in ("ok", "infeasible")
    entries = {
        MEMORY: measurement.peak_memory_bytes if is_whole else None,
        STEP_TIME: measurement.step_time_s if is_whole else None,
        REASON: measurement.message or None,
        WALL: measurement.wall_s,
        "mfu": measurement.mfu,
        "stability": measurement.stability,
        LAUNCH: to_attribute(launch),
    }
    return {name: value for name, value in entries.items() if value is not None}


def launch_of(
    attribute: Mapping[str, Any], plan: TrialPlan, folder: Path, *, config_hash: str
) -> Launch | None:
    """Return the measurement that an attribute holds; None: it is of something else.

    Args:
        attribute: what `to_attribute` gave.
        plan: what was asked of the measurement.
        folder: where its files belong in this process's folder of the study.
        config_hash: key of the measurement.
    """
    try:
        record = TrialRecord.model_validate(attribute["record"])
        result = attribute["result"] and TrialResult.model_validate(attribute["result"])
        values = attribute["measured"]
        measured = values and MeasuredTrial(
            **{**values, "step_time_s": tuple(values["step_time_s"])}
        )
    except (KeyError, TypeError, ValidationError, SearchError):
        return None  # of another version
    if record.config_hash != config_hash:
        return None
    return Launch(
        number=plan.number,
        repeat=plan.repeat,
        plan=plan,
        folder=folder,
        outcome=TrialOutcome(record=record, result=result or None),
        measured=measured or None,
    )


def keep_files(launch: Launch) -> None:
    """Write the files of a measurement that was made elsewhere; trial.json, which counts, last."""
    launch.folder.mkdir(parents=True, exist_ok=True)
    if launch.outcome.result is not None:
        write_json(launch.folder / TrialResult.FILE, launch.outcome.result)
    write_json(launch.folder / TrialRecord.FILE, launch.outcome.record)
