"""Quantiles of Student's t distribution, for intervals from few repeats."""

from __future__ import annotations

__all__ = ["student_quantile"]


def student_quantile(probability: float, freedom: int) -> float:
    """Return the value that a t variable stays below with this probability.

    Args:
        probability: Between 0 and 1; 0.975 for a two-sided interval of 95 %.
        freedom: Degrees of freedom, at least 1.
    """
    # SciPy takes longer to import than `mindtune space` runs; only a finished study gets here.
    from scipy.special import stdtrit  # noqa: PLC0415

    return float(stdtrit(freedom, probability))
