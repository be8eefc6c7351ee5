"""The policies by name, in the order of their priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindtune.policies.batch_size import BatchSizePolicy
from mindtune.policies.gradient_norm import GradientNormPolicy
from mindtune.policies.loss_scale import LossScalePolicy
from mindtune.policies.policy import Policy
from mindtune.policies.settings import PolicySettings

__all__ = ["POLICIES"]

POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "loss_scale": LossScalePolicy.from_settings,
    "gradient_norm": GradientNormPolicy.from_settings,
    "batch_size": BatchSizePolicy.from_settings,
}
"""Name under `policies:` -> how to build it. What protects the weights comes first."""
