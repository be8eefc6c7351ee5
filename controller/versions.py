"""Versions of installed packages, from their metadata alone."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

__all__ = ["installed_versions"]


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return package -> version for those that are installed; nothing is imported."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in packages}
    return {name: entry.version for name, entry in found.items() if entry is not None}
