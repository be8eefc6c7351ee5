"""Runs in MindFormers' environment: loads YAMLs as its trainer does and asks its rules.

Arguments: a JSON file with {"yamls": [paths], "devices": number}, and the file to write: per YAML
what its rules say (null: they pass), the names that its models give to sizes, and what else the
test compares.
"""

import json
import os
import sys
from pathlib import Path

asked = json.loads(Path(sys.argv[1]).read_text())
os.environ["RANK_SIZE"] = str(asked["devices"])

import mindspore as ms  # noqa: E402
from mindformers import MindFormerConfig  # noqa: E402
from mindformers.core.parallel_config import build_parallel_config  # noqa: E402
from mindformers.parallel_core.transformer_config_utils import (  # noqa: E402
    COMMON_CONFIG_MAPPING,
)
from mindformers.tools.check_rules import check_rules  # noqa: E402


def refusal(path):
    """Return why MindFormers refuses a YAML, and the block that it keeps for us."""
    config = MindFormerConfig(path)
    mode = "semi_auto_parallel" if config.use_parallel else "stand_alone"
    # The pipeline's context: rules ask for it, and no ranks run here.
    ms.set_auto_parallel_context(parallel_mode=mode)
    block = config.get("mindtune")
    try:
        build_parallel_config(config)
        # As its trainer does, once it has a dataset.
        check_rules(config, mode="train", dataset=object())
    except ValueError as error:
        return {"refusal": str(error), "block": block is not None}
    return {"refusal": None, "block": block is not None}


names = {}
for keys, target in COMMON_CONFIG_MAPPING.items():
    name = target[0] if isinstance(target, tuple) else target
    names.setdefault(name, []).extend([keys] if isinstance(keys, str) else keys)
told = {"yamls": {path: refusal(path) for path in asked["yamls"]}, "names": names}
Path(sys.argv[2]).write_text(json.dumps(told))
