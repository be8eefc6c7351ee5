"""The workload's config, its documented defaults and the study that comes with it."""

import itertools
import math
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml

from mindtune.controller.contract import StudyFile, parse
from mindtune.controller.errors import ConfigError
from mindtune.experiments.gpt.config import (
    GptConfig,
    load_config,
    parse_config,
    recomputed_blocks,
)
from mindtune.experiments.gpt.shape import model_shape

FOLDER = Path(str(resources.files("mindtune.experiments.gpt") / "base.yaml")).parent


def test_base_yaml_spells_out_every_default():
    tree = yaml.safe_load((FOLDER / "base.yaml").read_text(encoding="utf-8"))
    assert load_config(FOLDER / "base.yaml") == GptConfig()
    for name, section in GptConfig().model_dump().items():
        assert set(tree[name]) == set(section), name


def test_an_empty_config_and_empty_sections_are_the_defaults():
    assert parse_config(None) == GptConfig()
    assert parse_config({"faults": None, "training": None}) == GptConfig()


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"trainin": {}}, ["'trainin'", "model, parallel, training, data, output, faults"]),
        ({"data": {"worker": 1}}, ["'worker'", "data", "workers, prefetch, cache"]),
        ({"faults": {"poison": {"stp": 1}}}, ["'stp'", "faults.poison", "steps, kind, factor"]),
        ({"training": {"precision": "bfloat16"}}, ["training.precision", "'bfloat16'"]),
        ({"training": {"steps": "many"}}, ["training.steps", "'many'"]),
        ({"training": {"steps": 0}}, ["training.steps", "greater than or equal to 1", "0"]),
        ({"training": {"recompute": "selective"}}, ["none, full, interval:K", "'selective'"]),
        ({"training": {"recompute": "interval:9"}}, ["num_layers = 4", "'interval:9'"]),
        ({"training": {"gradient_compression": "int8"}}, ["none, float16, topk:R", "'int8'"]),
        ({"training": {"gradient_compression": "topk:2"}}, ["(0, 1]", "'topk:2'"]),
        ({"training": {"gradient_compression": "float16"}}, ["data_parallel: 1", "float16"]),
        ({"model": {"num_heads": 3}}, ["num_heads", "128 and 3"]),
        ({"parallel": {"model_parallel": 3}}, ["model.num_heads", "4 and 3"]),
        ({"training": {"global_batch_size": 15}}, ["multiple of", "= 2", "15"]),
        ({"training": {"micro_batch_num": 3}}, ["= 8", "3", "null"]),
        ({"training": {"lr_schedule": "float"}}, ["warmup must be 0", "20"]),
        ({"training": {"loss_scale": -1.0}}, ["loss_scale", "-1.0"]),
        ({"faults": {"poison": {"steps": [0]}}}, ["count from 1", "[0]"]),
        (["model"], ["mapping", "list"]),
    ],
)
def test_a_wrong_config_is_refused_with_rule_and_value(tree, parts):
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    for part in parts:
        assert part in str(caught.value)


def test_knobs_are_brought_into_their_canonical_spelling():
    config = parse_config(
        {
            "parallel": {"data_parallel": 2},
            "training": {"recompute": "interval:1", "gradient_compression": "topk:0.10"},
        }
    )
    assert config.training.recompute == "full"
    assert config.training.gradient_compression == "topk:0.1"


def test_micro_batch_num_follows_from_the_other_sizes():
    tree = {"parallel": {"data_parallel": 2}, "training": {"micro_batch_size": 2}}
    assert parse_config(tree).micro_batch_num == 4


@pytest.mark.parametrize(
    ("recompute", "num_layers", "blocks"),
    [
        ("none", 4, ()),
        ("full", 3, (0, 1, 2)),
        ("interval:2", 4, (1, 3)),
        ("interval:3", 7, (2, 5)),
        ("interval:4", 4, (3,)),
    ],
)
def test_interval_recomputes_every_kth_block(recompute, num_layers, blocks):
    assert recomputed_blocks(recompute, num_layers) == blocks


def test_a_missing_file_and_broken_yaml_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("model: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    ("text", "environment", "parts"),
    [
        ("trainin: {}\n", {}, ["unknown key 'trainin'", "allowed: model"]),
        ("parallel: {data_parallel: 2}\n", {}, ["must be the number of ranks", "--worker_num 2"]),
        ("{}\n", {"RANK_SIZE": "2"}, ["must be the number of ranks", "but 2"]),
    ],
)
def test_the_program_ends_with_2_and_one_message(tmp_path, text, environment, parts):
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mindtune.experiments.gpt", "--config", "config.yaml"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MINDTUNE_")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def _study():
    tree = yaml.safe_load((FOLDER / "study.yaml").read_text(encoding="utf-8"))
    return parse(StudyFile, tree, source="study.yaml")


def test_the_study_has_at_least_100_configs_before_rules():
    values = [entry for entry in _study().space.values() if isinstance(entry, list)]
    assert math.prod(map(len, values)) >= 100


def test_the_study_knows_the_model_and_batch_of_the_base_config():
    study, base = _study(), GptConfig()
    shape = study.model.model_dump(exclude_none=True)
    assert shape | {"num_kv_heads": 4} == model_shape(base.model)
    assert study.training.global_batch_size == base.training.global_batch_size
    assert study.training.precision == base.training.precision


def test_every_config_of_the_study_that_fits_two_ranks_is_one_of_the_program():
    study = _study()
    base = yaml.safe_load((FOLDER / "base.yaml").read_text(encoding="utf-8"))
    names, choices = zip(*study.space.items(), strict=True)
    accepted = 0
    for values in itertools.product(*choices):
        knobs = dict(zip(names, values, strict=True))
        tree = {name: dict(section) for name, section in base.items()}
        for key, override in study.overrides.items():
            section, field = key.split(".")
            assert field in tree[section], key
            name = override if isinstance(override, str) else override.knob
            spelled = knobs[name] if isinstance(override, str) else override.values[knobs[name]]
            tree[section][field] = spelled
        ranks = knobs["data_parallel"] * knobs["model_parallel"]
        fits = 16 % (knobs["data_parallel"] * knobs["micro_batch_size"]) == 0
        has_exchange = knobs["data_parallel"] > 1 or knobs["gradient_compression"] == "none"
        if ranks <= 2 and fits and has_exchange:
            parse_config(tree)
            accepted += 1
    assert accepted == 132


def test_the_base_config_lies_in_the_space_of_the_study():
    space, base = _study().space, GptConfig()
    for name in ("micro_batch_size", "recompute", "gradient_compression", "precision"):
        assert getattr(base.training, name) in space[name]
