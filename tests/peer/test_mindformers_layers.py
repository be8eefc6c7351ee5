"""Our rules and counts of layers per stage are those of MindFormers' own LayerSetting."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from mindtune.experiments.mindformers_peer import launch
from mindtune.search import layout
from mindtune.search.cost_model import CostModel
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.knobs import KNOBS, canonical
from mindtune.search.model_shape import ModelShape
from mindtune.search.rules import RULES
from mindtune.search.stage_list import column_sums

pytestmark = pytest.mark.peer
SCRIPT = Path(__file__).with_name("placed_layers.py")
CHECKS = {rule.name: rule.check for rule in RULES}


def rejection(case):
    """Return what our rules about layers say, and the config."""
    model = ModelShape(num_layers=case["layers"], hidden_size=8, num_heads=1, intermediate_size=8,
                       vocab_size=8, seq_length=8)  # fmt: skip
    cost = CostModel(StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=1),
                                model=model))  # fmt: skip
    config = {k.name: k.default for k in KNOBS.values() if k.default is not None}
    config |= {"pipeline_stage": case["stages"], "pp_interleave_num": case["chunks"],
               "offset": canonical("offset", case["offset"]),
               "recompute": canonical("recompute", case["recompute"])}  # fmt: skip
    return (
        CHECKS["layers_per_stage"](config, cost),
        CHECKS["recompute_per_stage"](config, cost),
        config,
    )


def draw_case(draw):
    stages, chunks = draw.choice([2, 3, 4]), draw.choice([1, 1, 2])
    layers = draw.randint(max(stages * chunks - 3, 1), 4 * stages * chunks)
    offset = [[draw.choice([0, 0, 0, 1, -1]) for _ in range(stages)] for _ in range(chunks)]
    rest = layers % (stages * chunks) - sum(map(sum, offset))
    if draw.random() < 0.8:  # most of them have the right sum
        offset[draw.randrange(chunks)][draw.randrange(stages)] += rest
    kind = draw.random()
    if kind < 0.2:
        offset = 0
    elif kind < 0.5:
        offset = [list(row) for row in layout.balanced_offset(layers, stages, chunks)]
    recompute = [draw.randint(0, 4) for _ in range(stages)]
    if not any(recompute):
        recompute = False
    return {
        "layers": layers, "stages": stages, "chunks": chunks, "recompute": recompute,
        "offset": offset if offset == 0 or chunks > 1 else offset[0],
    }  # fmt: skip


def test_layers_and_repeated_layers_lie_where_mindformers_puts_them(tmp_path):
    python = os.environ.get(launch.PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{launch.PYTHON_VARIABLE} names no Python with MindFormers: CONTRIBUTING.md")
    draw = random.Random(7)
    cases = [draw_case(draw) for _ in range(300)]
    asked, told = tmp_path / "cases.json", tmp_path / "placed.json"
    asked.write_text(json.dumps(cases))
    subprocess.run(
        [python, SCRIPT, asked, told], cwd=tmp_path, check=True, capture_output=True, timeout=120
    )
    placed = refused = cut = 0
    for case, found in zip(cases, json.loads(told.read_text()), strict=True):
        layers_rejected, recompute_rejected, config = rejection(case)
        assert (layers_rejected is not None) == ("refusal" in found), (
            case,
            found,
            layers_rejected,
        )
        if "refusal" in found:
            refused += 1
            continue
        placed += 1
        assert layout.chunk_layers(config, case["layers"]) == tuple(map(tuple, found["layers"]))
        ours = [whole for whole, _ in layout.repeated_layers(config, case["layers"])]
        theirs = list(column_sums(tuple(map(tuple, found["repeated"]))))
        if recompute_rejected is None:
            assert ours == theirs, case
        else:
            # They cut what is too much in silence; we say so, or that it is every layer.
            cut += 1
            assert [
                min(a, b) for a, b in zip(ours, column_sums(found["layers"]), strict=True)
            ] == theirs
    assert min(placed, refused, cut) > 20
