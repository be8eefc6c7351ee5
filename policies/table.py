"""The policies by name, in the order of their priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindtune.policies.batch_size import BatchSizePolicy
from mindtune.policies.clipping import ClippingPolicy
from mindtune.policies.gradient_norm import GradientNormPolicy
from mindtune.policies.loss_scale import LossScalePolicy
from mindtune.policies.memory_guard import MemoryGuardPolicy
from mindtune.policies.policy import Policy
from mindtune.policies.rewind import RewindPolicy
from mindtune.policies.settings import PolicySettings
from mindtune.policies.skip_update import SkipUpdatePolicy

__all__ = ["POLICIES"]

POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "loss_scale": LossScalePolicy.from_settings,
    "skip_update": SkipUpdatePolicy.from_settings,
    "rewind": RewindPolicy.from_settings,
    "gradient_norm": GradientNormPolicy.from_settings,
    "clipping": ClippingPolicy.from_settings,
    "memory_guard": MemoryGuardPolicy.from_settings,
    "batch_size": BatchSizePolicy.from_settings,
}
"""Name under `policies:` -> how to build it. What protects the weights comes first."""
