"""The controller's state on disk, one file per checkpoint of the user's.

A state belongs to the weights that were current when it was saved. On a resume, the optimizer's
own count of updates says which weights those are: the newest state with at most that count fits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindtune.controller.contract import read_json, write_atomic
from mindtune.controller.errors import ConfigError

__all__ = ["ControllerState", "find_state", "read_state", "save_state"]

_LOGGER = logging.getLogger(__name__)
_SCHEMA = 1
_KEPT = 20


@dataclass(frozen=True, kw_only=True)
class ControllerState:
    """Everything that a resumed run goes on with."""

    step: int
    """Optimizer steps attempted."""
    updates: int | None
    """The optimizer's own count of updates; None where it has none."""
    engine: Mapping[str, Any]
    """State of detectors, policies and arbiter."""
    knobs: Mapping[str, float]
    """Values that the actuators had set."""
    snapshots: Mapping[str, Any] | None = None
    """Which earlier states can be returned to; None: none that outlive the process."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-ready data."""
        return {
            "schema": _SCHEMA,
            "step": self.step,
            "updates": self.updates,
            "engine": dict(self.engine),
            "knobs": {name: _spell(value) for name, value in self.knobs.items()},
            "snapshots": None if self.snapshots is None else dict(self.snapshots),
        }

    @classmethod
    def from_dict(cls, content: Any, *, source: str = "the controller's state") -> ControllerState:
        """Read what `to_dict` returned.

        Raises:
            ConfigError: it is of another version, or is no state.
        """
        if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
            found = content.get("schema") if isinstance(content, dict) else type(content).__name__
            raise ConfigError(
                f"{source} must have schema {_SCHEMA}, but got {found}; delete it to start afresh."
            )
        try:
            updates = content["updates"]
            # States written before there were any do not have the key.
            snapshots = content.get("snapshots")
            return cls(
                step=int(content["step"]),
                updates=None if updates is None else int(updates),
                engine=dict(content["engine"]),
                knobs={name: float(value) for name, value in dict(content["knobs"]).items()},
                snapshots=None if snapshots is None else dict(snapshots),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{source} must hold step, updates, engine and knobs, but: {error!r}; "
                "delete it to start afresh."
            ) from None


def read_state(content: Any) -> ControllerState | None:
    """Return the state that `ControllerState.to_dict` gave out.

    That of another version is passed over with a warning, since a run must not end for it: None.

    Raises:
        ConfigError: it is no state.
    """
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema != _SCHEMA:
        _LOGGER.warning(
            "the controller's state has schema %d, this version reads %d: detectors, policies, "
            "budgets and knobs start afresh",
            schema,
            _SCHEMA,
        )
        return None
    return ControllerState.from_dict(content)


def save_state(folder: Path, state: ControllerState) -> Path:
    """Write a state into `folder`, atomically, and drop those that were written longest ago.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = folder / f"controller_{state.step:09d}.json"
    write_atomic(path, json.dumps(state.to_dict(), allow_nan=False) + "\n")
    # Not by step: after a return to an early checkpoint the newest states have the lowest ones.
    saved = sorted(folder.glob("controller_*.json"), key=lambda file: file.stat().st_mtime_ns)
    for old in saved[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def find_state(folder: Path, *, updates: int) -> ControllerState | None:
    """Return the newest state in `folder` that is no newer than `updates` updates.

    One of another version, or that cannot be read, is passed over with a warning: a run must not
    end for it.
    """
    found = []
    for path in sorted(folder.glob("controller_*.json")):
        try:
            found.append(ControllerState.from_dict(read_json(path), source=str(path)))
        except ConfigError as error:  # noqa: PERF203 - each file on its own
            _LOGGER.warning("a saved state of the controller is passed over: %s", error)
    fitting = [state for state in found if state.updates is not None and state.updates <= updates]
    return max(fitting, key=lambda state: (state.updates or 0, state.step), default=None)


def describe_resume(
    state: ControllerState,
    *,
    knobs: Mapping[str, float],
    policies: Iterable[str],
    engine_is_whole: bool,
) -> str:
    """Say what a resumed run goes on with, and what is armed anew.

    Args:
        state: What was saved.
        knobs: Knobs that are set again.
        policies: Those of this run.
        engine_is_whole: Whether everything that was saved of the engine could be read; what could
            not has been told.
    """
    known = state.engine.get("policies")
    stored = set(known) if isinstance(known, Mapping) else set()
    names = sorted(policies)
    kept = [name for name in names if name in stored]
    fresh = [name for name in names if name not in stored]
    restored = ["knobs " + ", ".join(f"{name} {value:g}" for name, value in sorted(knobs.items()))]
    if not knobs:
        restored = ["no knob, since none was set"]
    if state.engine and engine_is_whole:
        restored.append("detectors, cool-downs and budgets")
        if kept:
            restored.append(f"policies {', '.join(kept)}")
    anew = [f"policies {', '.join(fresh)}"] if fresh and state.engine else []
    if not state.engine:
        anew.append("detectors and policies, of which nothing was saved")
    anew += ["watchdog (the first step may compile)", "counts of findings and actions"]
    return (
        f"the controller goes on from step {state.step}; restored: {'; '.join(restored)}; "
        f"armed anew: {'; '.join(anew)}"
    )


def _spell(value: float) -> float | str:
    """Infinity as text, which `float` reads: bare it would be no JSON."""
    return value if abs(value) < float("inf") else str(value)
