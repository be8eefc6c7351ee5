"""The section `trial` of a study file: how one trial is started and measured, and where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mindtune.controller.contract.base import ContractModel
from mindtune.controller.units import Duration

__all__ = ["REMOTE_SHELL", "Command", "Host", "TrialSection"]

_LARGEST = 2**53
"""Whole numbers up to here are floats without loss."""


def _checked_command(words: list[str]) -> list[str]:
    if not words or not words[0].strip():
        raise ValueError(f"must start with a program, but got {words!r}")
    if any("\0" in word for word in words):
        raise ValueError(f"must hold words without NUL, but got {words!r}")
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise ValueError(f"must hold whole characters, but got {words!r}") from None
    return words


Command = Annotated[list[str], Field(min_length=1), AfterValidator(_checked_command)]
"""Program and arguments, which a process can be started with."""


Host = Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9_:][\w.@:%\-]*$")]
"""Name or address of a machine, with `USER@` in front where its shell needs it: no option."""
REMOTE_SHELL = (
    "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15",
)  # fmt: skip
"""Never asks for a password; a host that does not answer is given up after 10 s, one that falls
silent after three unanswered signs of life (ssh_config's ServerAliveCountMax)."""


class TrialSection(ContractModel):
    """How one trial is started and measured."""

    command: Command
    """Program and arguments; `{config}` stands for the trial's config file."""
    launcher: Literal["none", "msrun", "slurm"] = "none"
    """none: the command starts its own ranks; otherwise the launcher is put in front."""
    hosts: list[Host] | None = Field(default=None, min_length=1)
    """Machines of msrun, devices_per_node ranks on each: the first is the one that searches, under
    the name that the others know it by. Null: this machine alone."""
    remote_shell: Command = Field(default_factory=lambda: list(REMOTE_SHELL))
    """Program and options that run a command line on another host, which both are added to."""
    callback: Literal["mindformers"] | None = None
    """mindformers: our callback joins the MindFormers YAML of each trial; null: the program has it
    itself, or its log is read."""
    base_config: str | None = None
    """The user's own config (YAML), relative to the study file; never edited."""
    warmup_steps: int = Field(default=5, ge=0, le=_LARGEST)
    """First steps that are not measured."""
    measure_steps: int = Field(default=30, ge=1, le=_LARGEST)
    """Steps that are measured after the warm-up."""
    confirm_steps: int = Field(default=200, ge=1, le=_LARGEST)
    """Steps of the leaders' confirmation from sample 0."""
    repeats: int = Field(default=3, ge=1, le=_LARGEST)
    """Times that each leader is measured."""
    startup_deadline: Duration = 1800.0
    """Longest time until the first step is done, compilation included."""
    deadline: Duration = 600.0
    """Longest time after that until the trial has ended."""
    load_checkpoint: str | None = None
    """Checkpoint that every trial starts from, relative to the study file."""
