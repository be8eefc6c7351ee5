"""What a search proposes."""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.search.cost_model import Prediction
from mindtune.search.knobs import Config

__all__ = ["Proposal"]


@dataclass(frozen=True)
class Proposal:
    """A config to be tried."""

    number: int
    """Of the Optuna trial; 0 is the baseline."""
    config: Config
    """Knobs of the space."""
    key: str
    """Hash of the complete config."""
    is_baseline: bool
    retry_of: int | None
    """Number of the interrupted trial that this one repeats."""
    prediction: Prediction
