"""Read a study file with everything that it names, and check it before anything runs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindtune.controller.contract import StudyFile, read_document, read_yaml
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.peaks import peak_flops
from mindtune.controller.trials.commands import resolve_command, with_files
from mindtune.controller.trials.hosts import Hosts, check_hosts
from mindtune.controller.trials.preflight import check_policies
from mindtune.controller.trials.trial_config import TrialConfig
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.model_shape import ModelShape
from mindtune.search.space import Space

__all__ = ["StudySetup", "load_study", "read_candidates", "study_facts"]


@dataclass(frozen=True)
class StudySetup:
    """A study file, checked, with its base config and space."""

    path: Path
    study: StudyFile
    config: TrialConfig
    base: Config
    """Knobs read back from the base config."""
    space: Space

    @property
    def folder(self) -> Path:
        """Folder of the study file, which its paths are relative to."""
        return self.config.base_dir

    @property
    def hosts(self) -> Hosts | None:
        """Machines that msrun's ranks run on; None: this one alone."""
        shell = with_files(self.study.trial.remote_shell, self.folder)
        return Hosts.of(self.study.trial.hosts, shell)

    def check_hosts(self, folder: Path) -> None:
        """Make sure that every machine that the study names can be used.

        Args:
            folder: that of the study, which all of them see.

        Raises:
            ConfigError: one of them cannot.
        """
        if self.hosts is not None:
            check_hosts(self.hosts, folder=folder, device=self.study.cluster.device)

    def with_peak(self, flops_per_device: float | None) -> Space:
        """Return the space with another peak of a device."""
        facts = study_facts(self.study, flops_per_device)
        return _space(self.study, self.folder, facts, self.base)

    def knobs(self, config: Mapping[str, KnobValue]) -> Config:
        """Return a config of the space with what the base config holds and what follows."""
        return self.space.with_derived({**self.base, **config})

    def trial_command(self, config_file: Path) -> list[str]:
        """Return the command of a trial, ready to run.

        Raises:
            ConfigError: if a script that it names does not exist.
        """
        return resolve_command(self.study.trial.command, config=config_file, base_dir=self.folder)


def load_study(path: Path) -> StudySetup:
    """Read and check a study file.

    Raises:
        ConfigError: if it, or a file that it names, is missing or not valid.
        SearchError: if the space is not valid.
        PolicyError: if a policy's settings are not.
    """
    study = read_document(StudyFile, path)
    folder = path.resolve().parent
    config = TrialConfig.read(study, folder)
    base = config.base_knobs()
    cluster = study.cluster
    known = cluster.peak_flops if isinstance(cluster.peak_flops, float) else None
    if cluster.peak_flops is None:
        found = peak_flops(cluster.device, study.training.precision)
        known = None if found is None else found.flops
    space = _space(study, folder, study_facts(study, known), base)
    setup = StudySetup(path, study, config, base, space)
    setup.trial_command(folder / "config.yaml")
    checkpoint = study.trial.load_checkpoint
    if checkpoint is not None and not (folder / checkpoint).exists():
        raise ConfigError(
            f"trial.load_checkpoint must exist, but there is no {folder / checkpoint}."
        )
    check_policies(study.policies)
    _check_spellings(setup)
    return setup


def study_facts(study: StudyFile, flops_per_device: float | None) -> StudyFacts:
    """Return what a study file says, in the terms of the search."""
    cluster = study.cluster.model_dump(exclude={"peak_flops"})
    return StudyFacts(
        cluster=Cluster(
            **cluster,
            peak_flops=flops_per_device,
            # msrun numbers the ranks of a node by its own number of them.
            whole_nodes=study.trial.launcher == "slurm" or study.trial.hosts is not None,
        ),
        training=Training(**study.training.model_dump()),
        model=None if study.model is None else ModelShape(**study.model.model_dump()),
        limits=Limits(**study.constraints.model_dump()),
    )


def _space(study: StudyFile, folder: Path, facts: StudyFacts, base: Config) -> Space:
    candidates = study.space.get("candidates")
    if candidates is None:
        return Space.from_spec(study.space, facts, base)
    return Space.from_spec(read_candidates(folder / str(candidates)), facts, base)


def read_candidates(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a candidate list: CSV with a header, or a YAML list of mappings.

    Raises:
        ConfigError: if it is missing, empty or of another form.
    """
    if path.suffix == ".csv":
        try:
            # Spreadsheets put a byte-order mark in front.
            with path.open(encoding="utf-8-sig", newline="") as lines:
                table = csv.DictReader(lines, strict=True)
                rows: Any = [dict(row) for row in table]
        except (OSError, ValueError, csv.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"{path} must be a readable CSV file, but: {reason}.") from None
        names = list(table.fieldnames or ())
        if len(set(names)) < len(names):
            raise ConfigError(
                f"{path}, line 1 must name each knob once, but got {', '.join(names)}."
            )
        for number, row in enumerate(rows, start=2):
            if None in row or None in row.values():
                raise ConfigError(
                    f"{path}, line {number} must have as many cells as the header, but has not."
                )
    else:
        rows = read_yaml(path)
    if not isinstance(rows, list) or not rows or not all(map(_is_config, rows)):
        raise ConfigError(
            f"{path} must hold a list of configs, one mapping or line of knobs each, but it does "
            "not."
        )
    return rows


def _is_config(row: object) -> bool:
    return isinstance(row, dict) and bool(row) and all(isinstance(name, str) for name in row)


def _check_spellings(setup: StudySetup) -> None:
    """Check that `overrides` spell every value of the space before the first trial needs it."""
    choices = setup.space.choices
    longest = max(len(values) for values in choices.values())
    for index in range(longest):
        config = {name: values[index % len(values)] for name, values in choices.items()}
        setup.config.overrides({**setup.base, **config})
