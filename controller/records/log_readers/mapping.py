"""The user's own names: which column, key or tag of a log stands for which signal.

`loss=train/loss_avg,step=global_step,step_time_s=iter:ms`, or a YAML file that maps signals to
names in the same spelling. A unit follows the last colon where the log's is not ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindtune.controller.contract import read_yaml
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers.fields import Names
from mindtune.policies.signals import SIGNAL_NAMES

__all__ = ["read_mapping"]

_UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "%": 0.01,
    "KB": 2.0**10, "MB": 2.0**20, "GB": 2.0**30, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip
"""Factor to seconds, a ratio or bytes; sizes are binary, as everywhere."""
_NO_NUMBER = "phase"


def read_mapping(text: str) -> Names:
    """Return the names that the text of `--map` gives.

    Args:
        text: `signal=name` or `signal=name:unit`, separated by commas; or the path of a YAML file.

    Raises:
        ConfigError: if it is neither, names a signal that there is not, or none.
    """
    told = _pairs(text) if "=" in text else _from_file(Path(text))
    columns: dict[str, tuple[str, float]] = {}
    for signal, name in told:
        if signal not in SIGNAL_NAMES or signal == _NO_NUMBER:
            known = ", ".join(entry for entry in SIGNAL_NAMES if entry != _NO_NUMBER)
            raise ConfigError(f"--map must name signals ({known}), but got {signal!r}.")
        if signal in columns:
            raise ConfigError(f"--map must name each signal once, but {signal} stands twice.")
        columns[signal] = _with_unit(name)
    if not columns:
        raise ConfigError(f"--map must be such as loss=train/loss_avg, but got {text!r}.")
    return Names(columns)


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for part in text.split(","):
        signal, sign, name = (piece.strip() for piece in part.partition("="))
        if not sign or not name:
            raise ConfigError(
                f"--map must be such as loss=train/loss_avg,step=global_step, but got {part!r}; "
                "where a name has a comma, write the mapping to a YAML file and give its path."
            )
        pairs.append((signal, name))
    return pairs


def _from_file(path: Path) -> list[tuple[str, str]]:
    content: Any = read_yaml(path)
    if not isinstance(content, dict) or not all(
        isinstance(entry, str) for pair in content.items() for entry in pair
    ):
        raise ConfigError(f"{path} must map signals to names, such as `loss: train/loss_avg`.")
    return list(content.items())


def _with_unit(name: str) -> tuple[str, float]:
    before, colon, unit = name.rpartition(":")
    return (before, _UNITS[unit]) if colon and before and unit in _UNITS else (name, 1.0)
