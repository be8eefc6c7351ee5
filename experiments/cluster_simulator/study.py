"""The study file of a simulated cluster, as a user would write it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from mindtune.controller.contract import ClusterSection, StudyFile, parse, write_yaml
from mindtune.experiments.cluster_simulator.problems import KINDS, problem
from mindtune.experiments.cluster_simulator.trial import SimulatedCluster

__all__ = ["study_content", "write_study"]


def study_content(kind: str, seed: int) -> dict[str, Any]:
    """Return the study of a problem: what is stated of its cluster, and its space."""
    known = problem(kind, seed)
    facts = known.space.facts
    assert facts.model is not None  # noqa: S101 - every problem has one
    # What follows from the launcher is no key of the section.
    cluster = {name: getattr(facts.cluster, name) for name in ClusterSection.model_fields}
    model = {one.name: getattr(facts.model, one.name) for one in fields(facts.model)}
    return {
        "schema": 1,
        "study": {"name": known.name, "trials": 15},
        "trial": {
            "command": [
                "python", "-m", "mindtune.experiments.cluster_simulator", "trial",
                "--config", "{config}",
            ],
            "base_config": "base.yaml",
            "warmup_steps": known.warmup_steps,
            "measure_steps": known.measure_steps,
            "confirm_steps": 60,
            "repeats": 3,
        },
        "model": {name: value for name, value in model.items() if value is not None},
        "cluster": cluster,
        "training": {
            "global_batch_size": facts.training.global_batch_size,
            "precision": facts.training.precision,
            "optimizer": facts.training.optimizer,
        },
        "space": dict(KINDS[kind].space),
        "constraints": {"memory_utilization": facts.limits.memory_utilization},
    }  # fmt: skip


def write_study(kind: str, seed: int, folder: Path, *, time_scale: float = 0.0) -> Path:
    """Write study.yaml and base.yaml into a folder; return the path of the first.

    Raises:
        ConfigError: if `time_scale` is below 0 or not finite.
        OSError: if the folder cannot be written.
    """
    config = parse(
        SimulatedCluster, {"kind": kind, "seed": seed, "time_scale": time_scale}, source="options"
    )
    folder.mkdir(parents=True, exist_ok=True)
    study = folder / "study.yaml"
    header = f"The simulated cluster {kind} of seed {seed}: `mindtune search` needs no device."
    write_yaml(study, StudyFile.model_validate(study_content(kind, seed)), header=header)
    write_yaml(folder / "base.yaml", config, header="Config of the simulated training.")
    return study
