"""Every format that can be read, by name."""

from __future__ import annotations

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers.deepspeed import DEEPSPEED
from mindtune.controller.records.log_readers.fairseq import FAIRSEQ
from mindtune.controller.records.log_readers.gpt_lines import LLM_C, NANO_GPT
from mindtune.controller.records.log_readers.hf_trainer import TRAINER_CONSOLE, TRAINER_STATE
from mindtune.controller.records.log_readers.json_lines import JSON_LINES, LLAMA_FACTORY
from mindtune.controller.records.log_readers.key_value import KEY_VALUE
from mindtune.controller.records.log_readers.megatron import MEGATRON
from mindtune.controller.records.log_readers.mindformers import MINDFORMERS
from mindtune.controller.records.log_readers.mindspore_monitor import MINDSPORE_MONITOR
from mindtune.controller.records.log_readers.progress_bar import PROGRESS_BAR
from mindtune.controller.records.log_readers.reader import LogFormat
from mindtune.controller.records.log_readers.table import CSV_TABLE, SIGNALS_TABLE
from mindtune.controller.records.log_readers.tensorboard import TENSORBOARD

__all__ = ["AUTO", "READERS", "format_named", "listing"]

READERS: tuple[LogFormat, ...] = (
    SIGNALS_TABLE, CSV_TABLE, TRAINER_STATE, LLAMA_FACTORY, MINDFORMERS, MEGATRON, FAIRSEQ,
    DEEPSPEED, TRAINER_CONSOLE, LLM_C, NANO_GPT, MINDSPORE_MONITOR, JSON_LINES, PROGRESS_BAR,
    KEY_VALUE, TENSORBOARD,
)  # fmt: skip
"""The more special ones first. The one that finds the most losses in the first lines that hold any
reads all of a log, where a general one needs more than twice as many; among equals the first."""
AUTO = "auto"


def format_named(name: str) -> LogFormat:
    """Return the format of a name.

    Raises:
        ConfigError: if there is none.
    """
    for entry in READERS:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in READERS)
    raise ConfigError(f"--format must be {AUTO} or one of {names}, but got {name!r}.")


def listing() -> str:
    """Return the formats with what they are, one per line."""
    return "\n".join(f"  {entry.name}: {entry.description}" for entry in READERS)
