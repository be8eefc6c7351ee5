"""Errors of this package; the command line maps them to exit code 2."""

from __future__ import annotations

__all__ = ["PolicyError"]


class PolicyError(Exception):
    """A policy was configured or used against its rules; the message says rule, value, remedy."""
