"""Records on disk: signal table, decision log, results, and readers of other programs' logs."""

from __future__ import annotations

from mindtune.controller.records.decision_log import (
    DecisionWriter,
    merge_decisions,
    read_decisions,
)
from mindtune.controller.records.model_signal_log import (
    ModelSignalWriter,
    read_model_signals,
)
from mindtune.controller.records.profile_log import append_profile, read_profiles
from mindtune.controller.records.recorder import Recorder
from mindtune.controller.records.run_folder import RunFolder, new_run_folder
from mindtune.controller.records.signal_writer import (
    SignalWriter,
    iterate_signals,
    read_signals,
)

__all__ = [
    "DecisionWriter",
    "ModelSignalWriter",
    "Recorder",
    "RunFolder",
    "SignalWriter",
    "append_profile",
    "iterate_signals",
    "merge_decisions",
    "new_run_folder",
    "read_decisions",
    "read_model_signals",
    "read_profiles",
    "read_signals",
]
