"""Settings of policies as a user gives them, and their checked form.

Every policy declares two frozen dataclasses, `Limits` and `Thresholds`, whose fields are made with
`bounded`: the default and the closed range of allowed values. `build` turns the user's mapping
into one of them and refuses unknown names and values out of range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from mindtune.policies.errors import PolicyError

__all__ = ["Mode", "PolicySettings", "bounded", "build"]

Mode = Literal["observe", "act"]
"""observe: record, apply nothing; act: apply what the arbiter grants."""

_Values = TypeVar("_Values")


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What a study file or best_config.yaml says about one policy.

    Raises:
        PolicyError: if the mode is none of observe, act and None.
    """

    enabled: bool = True
    """False: the policy is not consulted at all."""
    mode: Mode | None = None
    """None: the mode of the run."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Hard bounds by name; see the policy's `Limits`."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """When the policy acts and how strongly, by name; see the policy's `Thresholds`."""

    def __post_init__(self) -> None:
        if self.mode not in (None, "observe", "act"):
            raise PolicyError(
                f"mode must be observe or act, but got {self.mode!r}; leave it out to take the "
                "mode of the run."
            )


def bounded(default: float, low: float, high: float) -> Any:  # the field stands for its value
    """Return a dataclass field with a default and the closed range of values a user may give."""
    return field(default=default, metadata={"low": low, "high": high})


def build(kind: type[_Values], values: Mapping[str, float], where: str) -> _Values:
    """Return `kind` with the user's values over its defaults.

    Args:
        kind: A dataclass whose fields are made with `bounded`; an integer default asks for whole
            numbers.
        values: The user's values by field name.
        where: How the user would name this mapping, such as `policies.loss_scale.limits`.

    Raises:
        PolicyError: if a name is unknown, or a value is not a number in its range.
    """
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type] # a dataclass
    unknown = [name for name in values if name not in known]
    if unknown:
        raise PolicyError(
            f"{where} has no {', '.join(map(repr, unknown))}; allowed are {', '.join(known)}."
        )
    checked: dict[str, float] = {}
    for name, value in values.items():
        entry = known[name]
        low, high = entry.metadata["low"], entry.metadata["high"]
        whole = isinstance(entry.default, int)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not is_number
            or math.isnan(value)
            or not low <= value <= high
            or (whole and value != int(value))
        ):
            kind_name = "an integer" if whole else "a number"
            raise PolicyError(
                f"{where}.{name} must be {kind_name} from {low:g} to {high:g}, but got {value!r}; "
                f"the default is {entry.default:g}."
            )
        checked[name] = int(value) if whole else float(value)
    return kind(**checked)
