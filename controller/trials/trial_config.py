"""From a base config and the knobs of one trial to the files that the trial finds in its folder.

The user's base config is read, never written. A knob reaches the user's program in three ways:
through the keys that the study file's `overrides` name, through `knobs.yaml`, and, for `env.NAME`,
through the environment.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindtune.controller.config_tree import get_key, set_key
from mindtune.controller.contract import (
    ENV_CHECKPOINT,
    KnobOverride,
    KnobsFile,
    StudyFile,
    TrialPlan,
    dump_yaml,
    read_yaml,
    write_atomic,
    write_yaml,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers.base_yaml import MindFormersYaml, is_mindformers
from mindtune.controller.mindformers.batch_keys import settled
from mindtune.controller.mindformers.plug_in import (
    ENV_REGISTER_PATH,
    check_command,
    in_own_folder,
    register_folder,
    with_callback,
)
from mindtune.controller.trials.spelling import Spelling
from mindtune.search.errors import SearchError
from mindtune.search.knobs import (
    DERIVED,
    ENV_PREFIX,
    Config,
    KnobValue,
    knob_text,
)

__all__ = ["TrialConfig", "knob_environment"]


def knob_environment(knobs: Mapping[str, KnobValue]) -> dict[str, str]:
    """Return the environment variables that the knobs `env.NAME` stand for."""
    return {
        name.removeprefix(ENV_PREFIX): knob_text(value)
        for name, value in knobs.items()
        if name.startswith(ENV_PREFIX)
    }


@dataclass(frozen=True)
class _Target:
    spelling: Spelling
    create: bool

    @property
    def knob(self) -> str:
        return self.spelling.knob


@dataclass(frozen=True)
class _Reading:
    """What one key of the base config says about its knob."""

    key: str
    value: Any
    candidates: tuple[KnobValue, ...]
    """Canonical values that it can mean, the first one preferred."""
    spelling: Spelling

    def allows(self, candidate: KnobValue) -> bool:
        """Return whether it can mean this value."""
        return candidate in self.candidates or self.spelling.means(self.value, candidate)


@dataclass(frozen=True)
class TrialConfig:
    """How a study's knobs reach the user's program."""

    study: StudyFile
    base_dir: Path
    """Folder of the study file, which its paths are relative to."""
    base: dict[str, Any]
    """Content of the base config; empty where there is none."""

    @classmethod
    def read(cls, study: StudyFile, base_dir: Path) -> TrialConfig:
        """Read the base config of a study and check that every override has its place there.

        Raises:
            ConfigError: if the base config is missing or no mapping, an override's key does not
                exist in it, or it is to take MindFormers' callback and cannot, or asks for what
                its mode cannot do.
        """
        name = study.trial.base_config
        base = {} if name is None else read_yaml(base_dir / name, repeated_keys=True)
        if base is None:
            base = {}
        if not isinstance(base, dict):
            raise ConfigError(
                f"{base_dir / str(name)} must hold a mapping of keys, but got "
                f"{type(base).__name__}."
            )
        config = cls(study, base_dir, base)
        if study.trial.callback == "mindformers":
            MindFormersYaml.of(base, source=config.source).check_mode()
            check_command(study.trial.command)
        elif study.constraints.framework == "mindformers" and is_mindformers(base):
            MindFormersYaml.of(base, source=config.source).check_mode()
        trial = copy.deepcopy(base)
        for key in study.overrides:
            parent = next((k for k in study.overrides if key.startswith(f"{k}.")), None)
            if parent is not None:
                raise ConfigError(
                    f"the keys of `overrides` must lie beside each other, but {key!r} lies inside "
                    f"{parent!r}; keep one of them."
                )
        for key, target in config._targets():
            set_key(trial, key, None, source=config.source, create=target.create)
        return config

    @property
    def source(self) -> str:
        """What to call the base config in messages."""
        name = self.study.trial.base_config
        return str(self.base_dir / name) if name else "the empty base config"

    def _targets(self) -> list[tuple[str, _Target]]:
        # Without a base config there is nothing that a key could be missing from.
        create = self.study.trial.base_config is None
        return [
            (key, _Target(Spelling(entry.knob, entry.values), entry.create or create))
            if isinstance(entry, KnobOverride)
            else (key, _Target(Spelling(entry, {}), create))
            for key, entry in self.study.overrides.items()
        ]

    def base_knobs(self) -> Config:
        """Return the knobs that the base config stands for, read back through the overrides.

        Knobs that nothing is known of are left out; the space has their defaults.

        Raises:
            ConfigError: if a value has no canonical spelling or two keys contradict each other.
        """
        config: Config = {}
        readings: dict[str, list[_Reading]] = {}
        for key, target in self._targets():
            reading = self._read_back(key, target)
            if reading is not None:
                readings.setdefault(target.knob, []).append(reading)
        for name, found in readings.items():
            candidates = dict.fromkeys(value for entry in found for value in entry.candidates)
            common = [c for c in candidates if all(entry.allows(c) for entry in found)]
            if not common:
                told = ", ".join(f"{entry.key} holds {entry.value!r}" for entry in found)
                raise ConfigError(
                    f"the keys of `overrides` for {name} must hold one value in {self.source}, "
                    f"but {told}; make them agree."
                )
            config[name] = common[0]
        for name in self.study.space:
            variable = name.removeprefix(ENV_PREFIX)
            if name.startswith(ENV_PREFIX) and variable in os.environ:
                config.setdefault(name, os.environ[variable])
        if "precision" in self.study.space:
            config.setdefault("precision", self.study.training.precision)
        return config

    def _read_back(self, key: str, target: _Target) -> _Reading | None:
        if target.knob in DERIVED:
            return None
        try:
            value = get_key(self.base, key, source=self.source)
        except ConfigError:
            if target.create:
                return None
            raise
        spelling = target.spelling
        try:
            candidates = spelling.read(value)
        except (SearchError, ValueError) as error:
            if value is None:
                # Null in a user's config means that the program decides.
                return None
            raise ConfigError(f"{self.source}: {key}: {error}") from None
        if not candidates and value not in spelling.values.values():
            if value is None:
                return None  # as above
            spelled = ", ".join(f"{name}: {entry!r}" for name, entry in spelling.values.items())
            raise ConfigError(
                f"the value of {key} in {self.source} must stand for a value of "
                f"{target.knob} ({spelled}), but got {value!r}; add it to `values`."
            )
        return _Reading(key, value, candidates, spelling)

    def overrides(self, knobs: Mapping[str, KnobValue]) -> dict[str, Any]:
        """Return dotted key -> value for one config, derived knobs included.

        Keys whose knob is not named stay as the base config has them.

        Raises:
            ConfigError: if an override does not spell the value of its knob.
        """
        known = {"global_batch_size": self.study.training.global_batch_size, **knobs}
        changed = {}
        for key, target in self._targets():
            if target.knob not in known:
                continue
            value = known[target.knob]
            try:
                changed[key] = target.spelling.write(value)
            except KeyError:
                raise ConfigError(
                    f"overrides.{key}.values must spell every value of {target.knob}, but "
                    f"{knob_text(value)} is not among {', '.join(target.spelling.values)}; add it."
                ) from None
        return settled(changed, knobs) if self.names_mindformers else changed

    def environment(
        self, knobs: Mapping[str, KnobValue], *, folder: Path | None = None
    ) -> dict[str, str]:
        """Return the environment variables that a config sets.

        Args:
            knobs: the config.
            folder: of the trial, for modules of the user's that MindFormers registers.

        Raises:
            ConfigError: if the user's REGISTER_PATH is no folder.
        """
        variables = knob_environment(knobs)
        if self.study.trial.load_checkpoint is not None:
            variables[ENV_CHECKPOINT] = str(
                (self.base_dir / self.study.trial.load_checkpoint).resolve()
            )
        if self.study.trial.callback == "mindformers":
            own = variables.get(ENV_REGISTER_PATH) or os.environ.get(ENV_REGISTER_PATH)
            registered = register_folder(folder or self.base_dir, own if folder else None)
            variables[ENV_REGISTER_PATH] = str(registered)
        return variables

    def merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base config with dotted keys changed; the base stays as it is."""
        tree = copy.deepcopy(self.base)
        create = {key for key, target in self._targets() if target.create}
        for key, value in changes.items():
            set_key(tree, key, value, source=self.source, create=key in create)
        return tree

    @property
    def names_mindformers(self) -> bool:
        """Whether the program is said to be MindFormers' trainer, whose keys are known."""
        named = self.study.trial.callback or self.study.constraints.framework
        return named == "mindformers"

    def write(self, folder: Path, knobs: Mapping[str, KnobValue], plan: TrialPlan) -> Path:
        """Write config.yaml and knobs.yaml into a trial's folder.

        Returns:
            The path of config.yaml, which `{config}` stands for.
        """
        path = folder / "config.yaml"
        tree = self.merged(self.overrides(knobs))
        if self.names_mindformers and is_mindformers(self.base):
            base_config = self.base_dir / str(self.study.trial.base_config)
            folders = [base_config.resolve().parent, self.base_dir]
            tree = in_own_folder(tree, folders=folders, repeat=plan.repeat)
            checkpoint = self.environment(knobs).get(ENV_CHECKPOINT)
            if checkpoint is not None:
                tree["load_checkpoint"] = checkpoint
        if self.study.trial.callback == "mindformers":
            tree = with_callback(tree)
        write_atomic(path, dump_yaml(tree))
        write_yaml(folder / KnobsFile.FILE, KnobsFile(knobs=dict(knobs), trial=plan))
        return path
