"""Errors of this package that the command line maps to exit codes."""

from __future__ import annotations

__all__ = ["ConfigError", "NothingFeasibleError"]


class ConfigError(Exception):
    """The user's input or environment is wrong (exit 2); the message says rule, value, remedy."""


class NothingFeasibleError(Exception):
    """No config of the space passes the rules: a finding (exit 1), with the rule that says so."""
