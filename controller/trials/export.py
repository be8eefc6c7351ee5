"""Write the best config of a study, or any config that was measured, as best_config.yaml.

Reads the study's own files only, so that it needs neither its database nor MindSpore.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from mindtune.controller.contract import (
    MINDFORMERS_KEY,
    BestConfig,
    Provenance,
    StudyFile,
    dump_yaml,
    read_document,
    read_yaml,
    write_atomic,
    write_yaml,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers.tuned_yaml import may_add, tuned_header, tuned_yaml
from mindtune.controller.trials.launch_lines import launch_lines
from mindtune.controller.trials.learned import learn
from mindtune.controller.trials.preflight import check_batch
from mindtune.controller.trials.production import read_best_config
from mindtune.controller.trials.study_folder import StudyFolder, relocated, relocated_command
from mindtune.controller.trials.summary import StudySummary, TrialSummary, read_summary
from mindtune.controller.trials.trial_config import TrialConfig
from mindtune.controller.versions import installed_versions

__all__ = ["export"]

_PACKAGES = ("mindtune", "mindspore", "numpy", "optuna")
_HEADER = """\
The config that a study found best, for `mindtune run` and TuneCallback.
It changes `base_config` by `overrides` when it is used; your own file is not edited."""


def export(
    study_dir: Path, *, out: Path, trial: int | None = None, mindformers: Path | None = None
) -> BestConfig:
    """Write a measured config as best_config.yaml and check that it can be used.

    Args:
        study_dir: folder of a study.
        out: file to write; paths in it are relative to its folder.
        trial: number of the config; None: the winner, or the best so far.
        mindformers: a MindFormers YAML; then `out` becomes one that differs from it in the tuned
            keys and in the `mindtune` block, which holds the content of a best_config.yaml.

    Raises:
        ConfigError: if there is no such config, it did not end ok, what was written breaks the
            batch identity, the MindFormers YAML lacks a tuned key, or `out` is a file of something
            else; then `out` is as it was.
    """
    folder = StudyFolder(study_dir)
    summary = read_summary(folder)
    number = summary.winner if trial is None else trial
    if number is None:
        raise ConfigError(
            f"{study_dir} must hold a config that ended ok, but none of its "
            f"{len(summary.trials)} did; see the messages in {folder.summary}."
        )
    chosen = summary.trial(number)
    # A winner was confirmed, though the search itself may have stopped it early.
    if chosen.outcome != "ok" and number != summary.winner:
        raise ConfigError(
            f"trial {number} must have ended ok to be exported, but it is {chosen.outcome}: "
            f"{chosen.message}"
        )
    study = read_document(StudyFile, folder.study_file)
    own_base = study.trial.base_config
    _check_target(out, folder, [mindformers, folder.root / own_base if own_base else None])
    check_batch(chosen.knobs, study.training.global_batch_size)
    best = _best_config(folder, study, summary, chosen, out.parent)
    best = best.model_copy(update={"launch": launch_lines(best)})
    tree = None
    if mindformers is not None:
        base_config = relocated(mindformers.name, old=mindformers.parent, new=out.parent)
        best = best.model_copy(update={"callback": "mindformers", "base_config": base_config})
        # The file is the program's config itself, but for our callback.
        lines = launch_lines(best, config=out.name)
        best = best.model_copy(update={"launch": lines})
        added = {key for key, entry in study.overrides.items() if may_add(entry)}
        batch = study.training.global_batch_size
        tree = tuned_yaml(mindformers, best, added=added, global_batch_size=batch)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.unchecked")
    try:
        if mindformers is None:
            write_yaml(partial, best, header=_HEADER)
        else:
            write_atomic(partial, tuned_header(mindformers) + dump_yaml(tree))
        read_best_config(partial)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return best


def _check_target(out: Path, folder: StudyFolder, bases: Sequence[Path | None]) -> None:
    """Refuse to write over what is no export, or is what it is made from.

    Raises:
        ConfigError: it is a file of the user's, who would lose it.
    """
    if not out.exists() or _same(out, folder.best_config):
        return
    if any(base is not None and _same(out, base) for base in bases):
        raise ConfigError(
            f"--out must be another file than the YAML that it is made from, but both are {out}; "
            "choose another name."
        )
    try:
        content = read_yaml(out)
    except ConfigError:
        content = None
    if isinstance(content, dict):
        content = content.get(MINDFORMERS_KEY, content)
    if not isinstance(content, dict) or "provenance" not in content:
        raise ConfigError(
            f"--out must be a new file or an earlier export, but {out} is something else, which "
            "would be lost; choose another name, or remove it."
        )


def _same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


def _best_config(
    folder: StudyFolder,
    study: StudyFile,
    summary: StudySummary,
    chosen: TrialSummary,
    target: Path,
) -> BestConfig:
    root = folder.root
    launches = chosen.confirming()
    memory = [m.peak_memory_bytes for m in launches if m.peak_memory_bytes is not None]
    base_config = _base_config(folder, study)
    return BestConfig(
        command=relocated_command(study.trial.command, old=root, new=target),
        launcher=study.trial.launcher,
        devices_per_node=study.cluster.devices_per_node,
        hosts=study.trial.hosts,
        remote_shell=relocated_command(study.trial.remote_shell, old=root, new=target)
        if study.trial.hosts
        else None,
        callback=study.trial.callback,
        base_config=base_config and relocated(base_config, old=root, new=target),
        overrides=TrialConfig(study, root, {}).overrides(chosen.knobs),
        knobs=chosen.knobs,
        policies=study.policies,
        learned=learn(
            [folder.trial_dir(chosen.number, launch.repeat) for launch in launches],
            peak_memory_bytes=max(memory, default=None),
        ),
        provenance=_provenance(study, summary, chosen, repeats=len(launches)),
    )


def _provenance(
    study: StudyFile, summary: StudySummary, chosen: TrialSummary, *, repeats: int
) -> Provenance:
    content = {
        "study": study.study.name,
        "trial": chosen.number,
        "value": chosen.value,
        "value_interval": None if chosen.interval is None else list(chosen.interval),
        "baseline_value": summary.trial(0).value,
        "objective": summary.objective,
        "hardware": summary.hardware,
        "device": study.cluster.device,
        "confirmed": chosen.confirmed,
        "repeats": repeats,
        "reason": summary.reason if chosen.number == summary.winner else "chosen by its number",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": installed_versions(_PACKAGES),
    }
    return Provenance.model_validate(content)


def _base_config(folder: StudyFolder, study: StudyFile) -> str | None:
    """Return the user's base config, or the study's copy if the user's is another one by now."""
    name = study.trial.base_config
    if name is None:
        return None
    own = folder.root / name
    if own.is_file() and read_yaml(own, repeated_keys=True) == read_yaml(folder.base_config):
        return name
    return folder.base_config.name
