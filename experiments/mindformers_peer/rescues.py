"""The faults that are shown in MindFormers' trainer, each guarded and unguarded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from mindtune.controller.contract import ContractModel, Number
from mindtune.controller.records import RunFolder, read_decisions
from mindtune.experiments.mindformers_peer.case import PeerCase, PeerRun, Scale

__all__ = ["CASES", "MEANINGS", "Rescue", "rescue_runs"]

_STEPS = 120
_LAST = 20

CASES = {
    "healthy": PeerCase(steps=_STEPS),
    "scale_search": PeerCase(steps=_STEPS, dtype="float16", scale=Scale(initial=2.0**32)),
    "overflow_storm": PeerCase(
        steps=_STEPS, dtype="float16", scale=Scale(initial=2.0**15, window=2)
    ),
    "absurd_rate": PeerCase(steps=_STEPS, learning_rate=1.0),
    "absurd_rate_float16": PeerCase(
        steps=_STEPS,
        learning_rate=1.0,
        lr_end=1.0,
        warmup_ratio=0.25,
        dtype="float16",
        scale=Scale(window=20),
    ),
    "frozen_loss": PeerCase(steps=_STEPS, learning_rate=1000.0, warmup_ratio=0.0),
}
"""Name -> the training, without our callback."""

MEANINGS = {
    "healthy": "float32, learning rate 0.003",
    "scale_search": "float16 from a loss scale of 2^32: harmless overflows until it fits",
    "overflow_storm": "float16, `scale_window` 2: MindFormers' rule grows into overflow for ever",
    "absurd_rate": "float32, learning rate 1.0, clip at 1: divergence without a non-finite value",
    "absurd_rate_float16": "float16, learning rate 1.0: the weights leave float16's range",
    "frozen_loss": "float32, learning rate 1000: the loss stays at ln 256, no update any more",
}

Guard = Literal["unguarded", "guarded"]
GUARDS: tuple[Guard, ...] = ("unguarded", "guarded")


class Rescue(ContractModel):
    """One training, guarded (mode `act`) or not (mode `observe`, which touches nothing)."""

    case: str
    guard: Guard
    steps: int
    updates_lost: int
    """Steps whose update MindFormers skipped."""
    loss: Number
    """Mean of the last 20; NaN if one of them is."""
    mean_loss: Number
    """Mean of all finite losses: what the run was worth on its way."""
    first_action: str | None
    """Step and name of the first set-point that was granted."""
    actions: int
    """Set-points granted."""
    stop_reason: str | None


def rescue_runs(
    names: Sequence[str],
    train: Callable[[PeerCase, Path], PeerRun],
    scratch: Path,
    tell: Callable[[str], None],
) -> list[Rescue]:
    """Train the named cases both ways, in turn."""
    rows = []
    for name in names:
        for guard in GUARDS:
            folder = scratch / f"{name}_{guard}"
            folder.mkdir(parents=True)
            mode = "act" if guard == "guarded" else "observe"
            case = CASES[name].model_copy(
                update={"plugged": "registry", "mindtune": {"mode": mode, "out_dir": "run"}}
            )
            rows.append(_row(name, guard, train(case, folder), RunFolder(folder / "run")))
            tell(f"{name}, {guard}: loss {rows[-1].loss:.3f} after {rows[-1].steps} steps")
    return rows


def _row(name: str, guard: Guard, seen: PeerRun, records: RunFolder) -> Rescue:
    granted = [
        entry
        for entry in read_decisions(records.decisions)
        if entry.verdict == "granted" and entry.action.startswith("Set")
    ]
    losses = [step.loss for step in seen.steps]
    finite = [loss for loss in losses if math.isfinite(loss)]
    first = None
    if granted:
        first = f"step {granted[0].step}: {granted[0].action} {granted[0].requested}"
    return Rescue(
        case=name,
        guard=guard,
        steps=len(losses),
        updates_lost=sum(step.overflow for step in seen.steps),
        loss=sum(losses[-_LAST:]) / min(_LAST, len(losses)),
        mean_loss=sum(finite) / len(finite),
        first_action=first,
        actions=len(granted),
        stop_reason=seen.stop_reason,
    )
