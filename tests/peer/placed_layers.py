"""Asks MindFormers where it places layers: cases as JSON in, placements or refusals as JSON out."""

import json
import sys
import types
from pathlib import Path

import mindspore as ms
from mindformers.modules.transformer.transformer import (
    TransformerRecomputeConfig,
    TransformerSwapConfig,
)
from mindformers.parallel_core.training_graph.transformer import utils


def place(case):
    ms.set_auto_parallel_context(
        pipeline_config={"pipeline_interleave": case["chunks"] > 1, "pipeline_scheduler": "1f1b"}
    )
    parallel = types.SimpleNamespace(
        pipeline_stage=case["stages"],
        gradient_aggregation_group=4,
        recompute=TransformerRecomputeConfig(recompute=case["recompute"]),
        swap=TransformerSwapConfig(),
    )
    try:
        setting = utils.LayerSetting(case["layers"], case["offset"], parallel, case["chunks"])
    except ValueError as refusal:
        return {"refusal": str(refusal)}
    return {
        "layers": setting.layer_list.tolist(),
        "repeated": [list(map(int, row)) for row in setting.layer_recompute],
    }


utils.is_legacy_model = lambda: True  # what a legacy model's config makes it return
cases = json.loads(Path(sys.argv[1]).read_text())
Path(sys.argv[2]).write_text(json.dumps([place(case) for case in cases]))
