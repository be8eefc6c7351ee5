"""From a base config and the knobs of one trial to the files that the trial finds in its folder.

The user's base config is read, never written. A knob reaches the user's program in three ways:
through the keys that the study file's `overrides` name, through `knobs.yaml`, and, for `env.NAME`,
through the environment.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindtune.controller.contract import (
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
from mindtune.controller.trials.config_tree import get_key, set_key
from mindtune.search.errors import SearchError
from mindtune.search.knobs import DERIVED, ENV_PREFIX, KNOBS, Config, KnobValue, canonical

__all__ = ["ENV_CHECKPOINT", "TrialConfig", "knob_text", "num_ranks", "with_derived"]

ENV_CHECKPOINT = "MINDTUNE_LOAD_CHECKPOINT"
"""Set in every trial of a study with `trial.load_checkpoint`: the checkpoint's path."""

_DEGREES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")


def num_ranks(config: Mapping[str, KnobValue]) -> int:
    """Return how many ranks a config runs on; experts lie inside data parallel."""
    return math.prod(int(config.get(name, 1)) for name in _DEGREES)


def with_derived(config: Mapping[str, KnobValue], global_batch_size: int) -> Config:
    """Return a config with micro_batch_num, where the knobs it follows from are known.

    Raises:
        ConfigError: if the batch identity cannot hold in whole numbers.
    """
    if "micro_batch_size" not in config:
        return dict(config)
    samples = int(config.get("data_parallel", 1)) * int(config["micro_batch_size"])
    if global_batch_size % samples:
        raise ConfigError(
            "global_batch_size must be a multiple of data_parallel * micro_batch_size = "
            f"{samples}, but got {global_batch_size}; choose sizes that divide it."
        )
    return {**config, "micro_batch_num": global_batch_size // samples}


def knob_text(value: KnobValue) -> str:
    """Return a canonical value as text, as the keys of `values` in an override spell it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


@dataclass(frozen=True)
class _Target:
    knob: str
    values: Mapping[str, Any]
    create: bool


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
            ConfigError: if the base config is missing or no mapping, or an override's key does
                not exist in it.
        """
        name = study.trial.base_config
        base = {} if name is None else read_yaml(base_dir / name)
        if base is None:
            base = {}
        if not isinstance(base, dict):
            raise ConfigError(
                f"{base_dir / str(name)} must hold a mapping of keys, but got "
                f"{type(base).__name__}."
            )
        config = cls(study, base_dir, base)
        trial = copy.deepcopy(base)
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
            (key, _Target(entry.knob, entry.values, entry.create or create))
            if isinstance(entry, KnobOverride)
            else (key, _Target(entry, {}, create))
            for key, entry in self.study.overrides.items()
        ]

    def base_knobs(self) -> Config:
        """Return the knobs that the base config stands for, read back through the overrides.

        Knobs that it says nothing about, and that the space names, have their own default.

        Raises:
            ConfigError: if a value has no canonical spelling, two keys contradict each other, or
                nothing tells the value of a knob.
        """
        config: Config = {}
        for key, target in self._targets():
            value = self._read_back(key, target)
            if value is None:
                continue
            if config.setdefault(target.knob, value) != value:
                raise ConfigError(
                    f"the keys of `overrides` for {target.knob} must hold one value in "
                    f"{self.source}, but {key} holds {knob_text(value)} and another "
                    f"{knob_text(config[target.knob])}; make them agree."
                )
        for name in self._named_knobs():
            if name not in config:
                config[name] = self._default(name)
        return config

    def _named_knobs(self) -> list[str]:
        """Return the knobs of `space`, derived ones left out; a candidate file names its own."""
        return [name for name in self.study.space if name not in {*DERIVED, "candidates"}]

    def _read_back(self, key: str, target: _Target) -> KnobValue | None:
        if target.knob in DERIVED:
            return None
        try:
            value = get_key(self.base, key, source=self.source)
        except ConfigError:
            if target.create:
                return None
            raise
        if target.values:
            names = [name for name, entry in target.values.items() if entry == value]
            if not names:
                spelled = ", ".join(f"{name}: {entry!r}" for name, entry in target.values.items())
                raise ConfigError(
                    f"the value of {key} in {self.source} must stand for a value of "
                    f"{target.knob} ({spelled}), but got {value!r}; add it to `values`."
                )
            value = names[0]
        try:
            return canonical(target.knob, value)
        except SearchError as error:
            if value is None:
                # Null in a user's config means that the program decides.
                return None
            raise ConfigError(f"{self.source}: {key}: {error}") from None

    def _default(self, name: str) -> KnobValue:
        if name == "precision":
            return self.study.training.precision
        if name.startswith(ENV_PREFIX):
            variable = name.removeprefix(ENV_PREFIX)
            if variable in os.environ:
                return os.environ[variable]
        elif (default := KNOBS[name].default) is not None:
            return default
        # Nothing says what an unset variable stands for: the first value of the space does.
        entry = self.study.space[name]
        return canonical(name, entry[0] if isinstance(entry, list) else entry)

    def overrides(self, config: Mapping[str, KnobValue]) -> dict[str, Any]:
        """Return dotted key -> value for one config.

        Keys whose knob the config does not name stay as the base config has them.

        Raises:
            ConfigError: if an override does not spell the value of its knob.
        """
        batch = self.study.training.global_batch_size
        known = {"global_batch_size": batch, **with_derived(config, batch)}
        changed = {}
        for key, target in self._targets():
            if target.knob not in known:
                continue
            value: Any = known[target.knob]
            if target.values:
                text = knob_text(value)
                if text not in target.values:
                    raise ConfigError(
                        f"overrides.{key}.values must spell every value of {target.knob}, but "
                        f"{text} is not among {', '.join(target.values)}; add it."
                    )
                value = target.values[text]
            changed[key] = value
        return changed

    def environment(self, config: Mapping[str, KnobValue]) -> dict[str, str]:
        """Return the environment variables that a config sets."""
        variables = {
            name.removeprefix(ENV_PREFIX): knob_text(value)
            for name, value in config.items()
            if name.startswith(ENV_PREFIX)
        }
        if self.study.trial.load_checkpoint is not None:
            variables[ENV_CHECKPOINT] = str(
                (self.base_dir / self.study.trial.load_checkpoint).resolve()
            )
        return variables

    def merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base config with dotted keys changed; the base stays as it is."""
        tree = copy.deepcopy(self.base)
        create = {key for key, target in self._targets() if target.create}
        for key, value in changes.items():
            set_key(tree, key, value, source=self.source, create=key in create)
        return tree

    def write(self, folder: Path, config: Mapping[str, KnobValue], plan: TrialPlan) -> Path:
        """Write config.yaml and knobs.yaml into a trial's folder.

        Returns:
            The path of config.yaml, which `{config}` stands for.
        """
        path = folder / "config.yaml"
        write_atomic(path, dump_yaml(self.merged(self.overrides(config))))
        knobs = with_derived(config, self.study.training.global_batch_size)
        write_yaml(folder / "knobs.yaml", KnobsFile(knobs=knobs, trial=plan))
        return path
