"""Errors of this package; the command line maps them to exit code 2."""

from __future__ import annotations

__all__ = ["SearchError", "SpaceExhaustedError"]


class SearchError(Exception):
    """A space, rule or study breaks its rules; the message says rule, value and remedy."""


class SpaceExhaustedError(Exception):
    """Every feasible config has been tried: not a mistake, but the end of a search.

    Args:
        number: The Optuna trial that was opened in vain and has to be closed.
    """

    def __init__(self, number: int) -> None:
        super().__init__("every feasible config has been tried")
        self.number = number
