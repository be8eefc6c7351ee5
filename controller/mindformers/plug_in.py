"""Makes a MindFormers YAML that runs in a folder of its own, with our callback.

The user's file is never edited: a trial and a production run get a YAML of their own.
MindFormers loads a callback that it does not know from the folder that `REGISTER_PATH` names, by
`auto_register: module.Class`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers import register

__all__ = [
    "ENV_REGISTER_PATH",
    "check_command",
    "in_own_folder",
    "register_folder",
    "with_callback",
]

ENV_REGISTER_PATH = "REGISTER_PATH"
"""Read by MindFormers: one folder, whose modules `auto_register` can name."""
_TYPE = "TuneCallback"
_ENTRY = {"type": _TYPE, "auto_register": f"mindtune_callback.{_TYPE}"}
_SAVER = "CheckpointMonitor"
_FLAG = "--register_path"
_FOLDER = "register"
_COMPILED = "__pycache__"
_SEED = 1
"""MindFormers' default."""
_OWN_OUTPUT = "./output"
"""MindFormers' default, below the working directory, which is the run's folder."""
_FRESH = {"load_checkpoint": "", "resume_training": False}
"""MindFormers' defaults of what a training goes on from."""
_PATH_ENDINGS = ("_dir", "_path", "_file", "_files", "_file_path", "path_or_dir", "name_or_path")
_PATH_KEYS = ("path", "load_checkpoint")
_WRITTEN = ("output_dir", "tensorboard_dir", "dump_path")
"""Where MindFormers writes; with keys that begin with `save_` relative to the run's own folder."""


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that would take the place of our folder.

    Raises:
        ConfigError: it sets `--register_path` itself.
    """
    for word in command:
        if word == _FLAG or word.startswith(f"{_FLAG}="):
            raise ConfigError(
                f"the command must leave {_FLAG} out, since our callback is registered from a "
                f"folder too, but has {word!r}; name your folder by the variable "
                f"{ENV_REGISTER_PATH}: its modules are found beside ours."
            )


def in_own_folder(
    tree: Mapping[str, Any], *, folders: Sequence[Path], repeat: int | None = None
) -> dict[str, Any]:
    """Return a YAML's content for a program that runs in another folder than the user's.

    Relative paths to read from become absolute, where there is something beside the user's own
    files; what is written lands in the program's folder. A trial writes everything into its own
    folder, saves no checkpoints, has a seed of its own, and begins at step 0 from no checkpoint of
    the user's: with `resume_training` MindFormers would go on at that one's step, epoch and loss
    scale, and may have nothing left to train.

    Args:
        tree: content of the YAML; stays as it is.
        folders: what relative paths may be relative to, the first that fits.
        repeat: of a trial: the first one has the user's seed; None: it is no trial.
    """
    changed = copy.deepcopy(dict(tree))
    _absolute(changed, folders)
    if repeat is None:
        return changed
    changed["output_dir"] = _OWN_OUTPUT
    changed |= {key: value for key, value in _FRESH.items() if changed.get(key)}
    own_seed = changed.get("seed")
    changed["seed"] = (own_seed if isinstance(own_seed, int) else _SEED) + repeat
    if changed.get("callbacks") is not None:
        changed["callbacks"] = [e for e in _entries(changed) if _type(e) != _SAVER]
    return changed


def with_callback(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a YAML's content with our callback last in the list, unless it is there.

    Raises:
        ConfigError: `callbacks` is no list.
    """
    entries = _entries(tree)
    if _TYPE in map(_type, entries):
        return dict(tree)
    return {**tree, "callbacks": [*entries, dict(_ENTRY)]}


def register_folder(folder: Path, own: str | None = None) -> Path:
    """Return the folder for `REGISTER_PATH`: ours, with the user's modules where there are some.

    Args:
        folder: of the trial or run; takes the links, if any.
        own: the user's REGISTER_PATH.

    Raises:
        ConfigError: the user's folder is none.
    """
    ours = Path(next(iter(register.__path__))).resolve()
    if not own or Path(own).resolve() == ours:
        return ours
    theirs = Path(own).resolve()
    if not theirs.is_dir():
        raise ConfigError(f"{ENV_REGISTER_PATH} must name a folder, but there is no {own}.")
    together = folder / _FOLDER
    together.mkdir(parents=True, exist_ok=True)
    # Python writes its compiled files beside the links, not into the user's folder.
    modules = [path for path in theirs.iterdir() if path.name != _COMPILED]
    _link(together, [*modules, *ours.glob("mindtune_*.py")])
    return together


def _entries(tree: Mapping[str, Any]) -> list[Any]:
    entries = tree.get("callbacks")
    if not isinstance(entries, (list, type(None))):
        raise ConfigError(
            f"callbacks of a MindFormers YAML must be a list of entries with a type, but got "
            f"{entries!r}."
        )
    return list(entries or [])


def _type(entry: Any) -> Any:
    return entry.get("type") if isinstance(entry, dict) else None


def _link(folder: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        link = folder / path.name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(path)


def _absolute(node: Any, folders: Sequence[Path]) -> None:
    """Make paths in a tree absolute, in place."""
    if not isinstance(node, dict):
        for entry in node if isinstance(node, list) else []:
            _absolute(entry, folders)
        return
    for key, value in node.items():
        if not _names_path(key):
            _absolute(value, folders)
        elif isinstance(value, str):
            node[key] = _found(value, folders)
        elif isinstance(value, list):
            node[key] = [_found(v, folders) if isinstance(v, str) else v for v in value]
        else:
            _absolute(value, folders)


def _names_path(key: object) -> bool:
    if not isinstance(key, str) or key in _WRITTEN or key.startswith("save_"):
        return False
    return key in _PATH_KEYS or key.endswith(_PATH_ENDINGS)


def _found(text: str, folders: Sequence[Path]) -> str:
    if not text or Path(text).is_absolute():
        return text
    for folder in folders:
        # The files of Megatron's datasets are named without their ending.
        if any((folder / f"{text}{ending}").exists() for ending in ("", ".bin")):
            return str((folder / text).resolve())
    return text
