"""Guided diagnosis: from symptoms to causes, with the evidence for and against each.

Rules stand in the order in which an expert would check (`diagnose.CAUSES`). A rule only gathers:
facts with their numbers and steps, and what was not measured. How sure a cause is follows from
the weights of these facts, so that no rule can be surer than what it shows. Everything is pure:
equal signals and incidents give equal diagnoses.
"""

from __future__ import annotations

from mindtune.policies.diagnosis.case import RunContext
from mindtune.policies.diagnosis.diagnose import CAUSES, diagnose
from mindtune.policies.diagnosis.history import Course, History
from mindtune.policies.diagnosis.learning import spelled_vocabulary
from mindtune.policies.diagnosis.model import Confidence, Diagnosis, Symptom

__all__ = [
    "CAUSES",
    "Confidence",
    "Course",
    "Diagnosis",
    "History",
    "RunContext",
    "Symptom",
    "diagnose",
    "spelled_vocabulary",
]
