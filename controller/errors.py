"""Errors of this room that the command line maps to exit code 2."""

from __future__ import annotations

__all__ = ["ConfigError"]


class ConfigError(Exception):
    """The user's input or environment is wrong; the message says rule, value and remedy."""
