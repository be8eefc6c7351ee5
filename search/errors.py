"""Errors of this room; the command line maps them to exit code 2."""

from __future__ import annotations

__all__ = ["SearchError"]


class SearchError(Exception):
    """A space, rule or study breaks its rules; the message says rule, value and remedy."""
