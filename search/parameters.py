"""The parameters of an Optuna study: one per knob, all of them chosen together."""

from __future__ import annotations

from collections.abc import Mapping

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial

from mindtune.search.attributes import FIXED
from mindtune.search.constraints import SpaceReport
from mindtune.search.ranking import choices

__all__ = ["parameters", "to_choose"]


def parameters(report: SpaceReport) -> dict[str, BaseDistribution]:
    """Return one categorical per knob; a base value outside the user's choices is added.

    Optuna forbids to change the choices of a parameter within a study.
    """
    return {name: CategoricalDistribution(values) for name, values in choices(report).items()}


def to_choose(
    trial: FrozenTrial, known: Mapping[str, BaseDistribution]
) -> dict[str, BaseDistribution]:
    """Return what a sampler chooses at once: every parameter, or none of a queued trial's.

    Args:
        trial: That is asked for.
        known: All parameters.
    """
    return {} if FIXED in trial.system_attrs else dict(known)
