"""What a study and a production run alike must hold before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from mindtune.controller.contract import PolicySection
from mindtune.controller.errors import ConfigError
from mindtune.policies.engine import build_engine
from mindtune.policies.settings import PolicySettings

__all__ = ["check_launcher", "check_policies"]


def check_launcher(launcher: str) -> None:
    """Refuse a launcher that this process cannot put in front of a command.

    Raises:
        ConfigError: it is Slurm, which starts ranks on machines that nobody here supervises.
    """
    if launcher == "slurm":
        raise ConfigError(
            "launcher must be none or msrun, but got slurm; use none with a command that calls "
            "srun itself."
        )


def check_policies(sections: Mapping[str, PolicySection]) -> None:
    """Refuse settings that no run could use.

    Raises:
        PolicyError: a policy, limit or threshold is unknown or out of range.
    """
    settings = {name: PolicySettings(**entry.model_dump()) for name, entry in sections.items()}
    build_engine(settings, mode="observe")
