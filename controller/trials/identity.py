"""What a measurement depends on, so that a resumed study never mixes what is not comparable."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
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
from mindtune.controller.mindformers.plug_in import ENV_REGISTER_PATH
from mindtune.controller.trials.program_code import program_code
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_setup import StudySetup
from mindtune.controller.versions import installed_versions
from mindtune.search.knobs import KnobValue

__all__ = ["Identity", "keep_identity", "measurement_hash", "study_identity"]

_PACKAGES = ("mindtune", "mindspore")
_BLOCKS = 64
_BLOCK = 1 << 16
"""Of a checkpoint 64 blocks of 64 KiB are read, evenly spaced: 4 MiB."""


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
        "the program's code": program_code(
            trial.command, setup.folder, registered=_registered(setup)
        ),
        "installed versions": installed_versions(_packages(setup)),
    }
    if trial.load_checkpoint is not None:
        parts["the checkpoint's content"] = _sample(setup.folder / trial.load_checkpoint)
    return Identity(parts={name: _hash(part) for name, part in parts.items()})


def _packages(setup: StudySetup) -> tuple[str, ...]:
    """Return the packages whose version a measurement depends on."""
    return (*_PACKAGES, "mindformers") if setup.config.names_mindformers else _PACKAGES


def _registered(setup: StudySetup) -> Path | None:
    """Return the folder of the user's modules that MindFormers loads; None: there is none."""
    own = os.environ.get(ENV_REGISTER_PATH)
    return Path(own) if own and setup.config.names_mindformers else None


def _sample(checkpoint: Path) -> dict[str, str]:
    """Return name -> size and hash of blocks of the files of a checkpoint.

    Training changes every number of it, so that a sample tells as much as the whole, which may be
    hundreds of gigabytes.
    """
    is_folder = checkpoint.is_dir()
    files = sorted(checkpoint.rglob("*")) if is_folder else [checkpoint]
    found = {}
    for path in files:
        if not path.is_file():
            continue
        size = path.stat().st_size
        content = hashlib.sha256(str(size).encode())
        with path.open("rb") as stream:
            for begin in range(0, size, max(_BLOCK, size // _BLOCKS)):
                stream.seek(begin)
                content.update(stream.read(_BLOCK))
        name = str(path.relative_to(checkpoint)) if is_folder else path.name
        found[name] = content.hexdigest()
    return found


def keep_identity(folder: StudyFolder, identity: Identity) -> None:
    """Write the identity of a new study, or check that of one that goes on.

    Raises:
        ConfigError: if another study lies in the folder, naming what differs.
    """
    if not folder.identity.exists():
        write_json(folder.identity, identity)
        return
    known = read_document(Identity, folder.identity).parts
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
