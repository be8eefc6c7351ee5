"""The committed JSON schemas, one per document; `python -m` this module rewrites them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mindtune.controller.contract.conditions import RunConditions
from mindtune.controller.contract.fault_plan import FaultPlan
from mindtune.controller.contract.gate_file import GateFile
from mindtune.controller.contract.goals_file import GoalsFile
from mindtune.controller.contract.model_signals import ModelSignalRecord
from mindtune.controller.contract.outputs import (
    CompareOutput,
    DoctorOutput,
    ExplainOutput,
    GateOutput,
    ReplayOutput,
    SpaceOutput,
)
from mindtune.controller.contract.profile_record import ProfileRecord
from mindtune.controller.contract.run_files import BestConfig, DecisionRecord, RunResult
from mindtune.controller.contract.run_metrics import RunMetrics
from mindtune.controller.contract.run_plan import RunPlan
from mindtune.controller.contract.study_file import StudyFile
from mindtune.controller.contract.trial_files import KnobsFile, TrialRecord, TrialResult
from mindtune.policies.signals import SIGNAL_NAMES

__all__ = ["DOCUMENTS", "FOLDER", "schema_of", "write_schemas"]

FOLDER = Path(__file__).parent / "schemas"

DOCUMENTS: dict[str, type[BaseModel]] = {
    "study": StudyFile,
    "knobs": KnobsFile,
    "trial_result": TrialResult,
    "trial_record": TrialRecord,
    "decision": DecisionRecord,
    "model_signals": ModelSignalRecord,
    "profile": ProfileRecord,
    "best_config": BestConfig,
    "run_result": RunResult,
    "run_conditions": RunConditions,
    "run_metrics": RunMetrics,
    "run_plan": RunPlan,
    "faults": FaultPlan,
    "gate": GateFile,
    "goals": GoalsFile,
    "space_output": SpaceOutput,
    "explain_output": ExplainOutput,
    "replay_output": ReplayOutput,
    "doctor_output": DoctorOutput,
    "compare_output": CompareOutput,
    "gate_output": GateOutput,
}
"""Name of the schema file -> model."""


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON schema of a document, or of a row of signals.csv for `signals`."""
    if name == "signals":
        return {
            "title": "signals.csv",
            "description": "Columns in the order in which they are written; any subset is read.",
            "type": "array",
            "items": {"enum": list(SIGNAL_NAMES)},
        }
    schema = DOCUMENTS[name].model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write_schemas(folder: Path = FOLDER) -> None:
    """Write every schema file."""
    folder.mkdir(exist_ok=True)
    for name in [*DOCUMENTS, "signals"]:
        text = json.dumps(schema_of(name), indent=2, sort_keys=True) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_schemas()
