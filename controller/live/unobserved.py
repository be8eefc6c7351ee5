"""What is told though no observation shows it, since no step brings it."""

from __future__ import annotations

from mindtune.controller.live.step_adapter import StepAdapter
from mindtune.controller.live.watchdog import Hang
from mindtune.policies.findings import Finding, FindingKind, Severity

__all__ = ["hang_finding", "hidden_steps_finding", "unreachable_knobs"]


def hidden_steps_finding(step: int, num_steps: int) -> Finding:
    """Return that one call runs `num_steps` steps, of which the last is `step`."""
    return Finding(
        step=step,
        last_step=step,
        kind=FindingKind.HIDDEN_STEPS,
        severity=Severity.WARNING,
        message=f"one call runs {num_steps} optimizer steps on the device (data sinking), "
        f"so {num_steps - 1} of {num_steps} steps stay unseen and no policy can act "
        "within them; train with dataset_sink_mode=False or sink_size=1",
        evidence={"steps_per_call": num_steps},
    )


def hang_finding(hang: Hang) -> Finding:
    """Return what the watchdog raised."""
    return Finding(
        step=hang.step,
        last_step=hang.step,
        kind=FindingKind.HANG,
        severity=Severity.CRITICAL,
        message=hang.message(),
        evidence={"stalled_s": hang.stalled_s, "limit_s": hang.limit_s},
    )


def unreachable_knobs(adapter: StepAdapter) -> str:
    """Return what cannot be turned on a training step, and what to do about it."""
    names = ", ".join(adapter.unreachable)
    reached = ", ".join(sorted(adapter.actuators.reachable)) or "none"
    return (
        f"{adapter.name} is not mindtune's training step: {names} cannot be turned on it; "
        f"reached: {reached}. Wrap the network in mindtune.controller.TrainStep for all knobs "
        "and signals."
    )
