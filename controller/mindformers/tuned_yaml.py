"""The user's MindFormers YAML with the tuned keys of a study, and where they come from."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mindtune.controller.config_tree import set_key
from mindtune.controller.contract import MINDFORMERS_KEY, BestConfig, KnobOverride
from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers.base_yaml import MindFormersYaml, comment_name
from mindtune.search.layout import num_ranks

__all__ = ["may_add", "tuned_header", "tuned_yaml"]

_RUN_SETTINGS = ("alerts", "faults", "max_num_microbatches", "mode", "model_signals", "out_dir",
                 "profiler", "rewind", "watchdog")  # fmt: skip
"""Keys of the block that say how to run, not what a study has found."""
_EXPORTED = "provenance"
"""Every exported block has it: then its policies are those of the study that it came from."""


def may_add(entry: str | KnobOverride) -> bool:
    """Tell whether an override adds its key where the YAML lacks it."""
    return isinstance(entry, KnobOverride) and entry.create


def tuned_yaml(
    path: Path, best: BestConfig, *, added: Collection[str], global_batch_size: int
) -> dict[str, Any]:
    """Return the content of a MindFormers YAML with a config's keys and the `mindtune` block.

    Args:
        path: the YAML; stays as it is.
        best: the config.
        added: keys that the YAML may lack.
        global_batch_size: samples of an optimizer step, by the study.

    Raises:
        ConfigError: it is no MindFormers YAML, lacks a tuned key, or would train another batch.
    """
    base = MindFormersYaml.read(path)
    tree = copy.deepcopy(base.tree)
    own = tree.pop(MINDFORMERS_KEY, None)
    for key, value in best.overrides.items():
        set_key(tree, key, value, source=base.source, create=key in added)
    ranks = num_ranks(best.knobs)
    batch = MindFormersYaml.of(tree, source=base.source).batch(ranks).global_batch_size
    if batch != global_batch_size:
        raise ConfigError(
            f"{path} must train global_batch_size = {global_batch_size} samples a step with the "
            f"tuned keys, as the study did, but trains {batch}; use the YAML that the study was "
            "made from, or correct runner_config and micro_batch_interleave_num."
        )
    block = best.to_plain()
    if isinstance(own, dict):
        # What the user asks of the run, such as alerts, stays where the study does not say. What
        # another study has found does not: its `learned` is of another config.
        kept = _RUN_SETTINGS if own.get(_EXPORTED) else (*_RUN_SETTINGS, "policies")
        block |= {key: own[key] for key in kept if key in own and not block.get(key)}
    return {**tree, MINDFORMERS_KEY: block}


def tuned_header(path: Path) -> str:
    """Return the comment at the head of the file."""
    name = comment_name(path)
    return (
        f"# {name} with the keys that a study has tuned, and the block `{MINDFORMERS_KEY}`:\n"
        "# for MindFormers, and for `mindtune run` and TuneCallback. Comments of that file are\n"
        "# not here; its other keys are as they were.\n"
    )
