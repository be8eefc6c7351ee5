"""What a measurement depends on, so that a resumed study never mixes what is not comparable."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

from mindtune.controller.contract import (
    ConstraintsSection,
    Document,
    ScoreSection,
    TrialPlan,
    dump_yaml,
    read_document,
    write_json,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.commands import names_file
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_setup import StudySetup
from mindtune.controller.versions import installed_versions
from mindtune.search.knobs import KnobValue

__all__ = ["Identity", "keep_identity", "measurement_hash", "study_identity"]

_PACKAGES = ("mindtune", "mindspore")


class Identity(Document):
    """identity.json in a study's folder: part of the study -> hash of its content."""

    FILE: ClassVar[str] = "identity.json"

    parts: dict[str, str]

    @property
    def combined(self) -> str:
        """One hash of all parts."""
        return _hash(self.parts)


def study_identity(setup: StudySetup) -> Identity:
    """Return the identity of a study: everything but how long and how often it measures.

    The number of trials, the budget, deadlines, repeats, the confirmation and the policies may
    change between two starts.
    """
    study = setup.study
    trial = study.trial
    steps = {"warmup_steps": trial.warmup_steps, "measure_steps": trial.measure_steps}
    parts: dict[str, Any] = {
        "study.name and study.seed": [study.study.name, study.study.seed],
        # A study that was started before callbacks could be named goes on without.
        "trial.command": [trial.command, trial.launcher, *filter(None, [trial.callback])],
        "trial.warmup_steps and measure_steps": steps,
        "trial.load_checkpoint": trial.load_checkpoint,
        "the base config": dump_yaml(setup.config.base),
        "model": study.model and study.model.to_plain(),
        "cluster": study.cluster.to_plain(),
        "training": study.training.to_plain(),
        "space": [{k: list(v) for k, v in setup.space.choices.items()}, setup.space.candidates],
        "constraints": _constraints(study.constraints),
        "score": _score(study.score),
        "overrides": study.to_plain()["overrides"],
        "the program's code": _code(setup),
        "installed versions": installed_versions(_PACKAGES),
    }
    return Identity(parts={name: _hash(part) for name, part in parts.items()})


def keep_identity(folder: StudyFolder, identity: Identity) -> None:
    """Write the identity of a new study, or check that of one that goes on.

    Raises:
        ConfigError: if another study lies in the folder, naming what differs.
    """
    path = folder.root / Identity.FILE
    if not path.exists():
        write_json(path, identity)
        return
    known = read_document(Identity, path).parts
    different = [name for name, part in identity.parts.items() if known.get(name) != part]
    if different:
        raise ConfigError(
            f"the study in {folder.root} can only go on as it was started, but these have "
            f"changed: {', '.join(different)}. Undo that, or give another folder with --out."
        )


def measurement_hash(identity: Identity, knobs: Mapping[str, KnobValue], plan: TrialPlan) -> str:
    """Return the key under which one measurement is known when a study resumes."""
    steps = [plan.warmup_steps, plan.measure_steps, plan.seed]
    return _hash([identity.combined, dict(knobs), steps])


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_FIRST_CONSTRAINTS = (
    "memory_utilization", "max_pipeline_bubble", "max_recompute_share",
    "min_micro_batches_per_stage", "tensor_parallel_inside_node",
)  # fmt: skip
"""Keys that every study has been started with."""


def _score(section: ScoreSection) -> dict[str, Any]:
    """Return the weights, and the objectives only where they are two: that key came later."""
    content = section.to_plain()
    if not content["pareto"]:
        del content["pareto"]
    return content


def _constraints(section: ConstraintsSection) -> dict[str, Any]:
    """Return the limits, those that came later only where they are set.

    A study that was started before a key existed goes on with it unset.
    """
    unset = ConstraintsSection().to_plain()
    return {
        name: value
        for name, value in section.to_plain().items()
        if name in _FIRST_CONSTRAINTS or value != unset[name]
    }


def _code(setup: StudySetup) -> dict[str, str]:
    """Return file -> hash of the scripts that the command names, or of its module's package."""
    words = setup.study.trial.command
    files = [
        setup.folder / word
        for word in words
        if word.endswith((".py", ".sh")) and names_file(word, setup.folder)
    ]
    named = {path.name: path for path in files}
    if "-m" in words[:-1]:
        named |= _module_files(words[words.index("-m") + 1])
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in named.items()
        if path.is_file()
    }


def _module_files(name: str) -> dict[str, Path]:
    """Return the files of a module, or of a package with all that lie below it."""
    spec = _find_spec(name)
    if spec is None or spec.origin is None:
        return {}
    origin = Path(spec.origin)
    if not spec.submodule_search_locations:
        return {origin.name: origin}
    root = origin.parent
    return {str(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module as `importlib.util.find_spec` does, but import none of its parents.

    They are the user's code: it may load a framework, or fail.
    """
    spec: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        found = (finder.find_spec(full, path) for finder in sys.meta_path)
        spec = next((entry for entry in found if entry is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations or ()
    return spec
