"""`init --mindformers`: what a MindFormers YAML says, in the terms of a study."""

import copy
import os
import random
from pathlib import Path

import pytest
import yaml

from mindtune.controller.cli.app import main
from mindtune.controller.contract import StudyFile, read_document
from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers.base_yaml import MindFormersYaml
from mindtune.controller.trials.new_study import write_study
from mindtune.controller.trials.production import read_best_config
from mindtune.controller.trials.study_setup import load_study
from mindtune.search.constraints import explain

HERE = Path(__file__).parent


def content(name="pipeline.yaml", **changes):
    """Return a sample with changed keys, `section__key=value`; None removes the key."""
    tree = copy.deepcopy(yaml.safe_load((HERE / name).read_text()))
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return tree


@pytest.fixture
def init(tmp_path, capsys):
    """Return a function that writes a YAML and its study: exit code, study setup, output."""

    def run(tree, *options):
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(tree))
        out = tmp_path / "study.yaml"
        out.unlink(missing_ok=True)
        code = main(["init", "--mindformers", str(tmp_path / "base.yaml"), str(out), *options])
        told = capsys.readouterr()
        setup = load_study(out) if code == 0 else None
        return code, setup, " ".join((told.out + told.err).split())

    return run


def test_a_pipelined_yaml_becomes_a_study_with_its_own_lists(tmp_path):
    base, out = tmp_path / "dense.yaml", tmp_path / "studies" / "study.yaml"
    base.write_bytes((HERE / "pipeline.yaml").read_bytes())
    assert main(["init", "--mindformers", str(base), str(out)]) == 0
    assert base.read_bytes() == (HERE / "pipeline.yaml").read_bytes()
    study = read_document(StudyFile, out)
    assert study.trial.base_config == "../dense.yaml"
    assert (study.trial.callback, study.trial.launcher) == ("mindformers", "msrun")
    assert "  # hosts: [node0, node1] # all of them" in out.read_text()
    assert study.training.global_batch_size == 16  # 1 x 2 x 8
    assert study.training.precision == "bfloat16"
    assert study.cluster.num_devices == 16
    assert study.constraints.framework == "mindformers"
    assert study.constraints.max_memory == 58 * 2**30
    model = study.model
    assert (model.num_layers, model.num_heads, model.num_kv_heads) == (18, 8, 4)
    assert (model.seq_length, model.gated_mlp, model.flash_attention) == (4096, True, True)
    setup = load_study(out)
    assert setup.base["recompute"] == "layers:3/2/2/0"
    assert setup.base["offset"] == "0/1/1/0"
    assert setup.base["optimizer_sharding"] == "optimizer"
    assert not explain(setup.space, setup.base).rejected
    assert main(["space", str(out)]) == 0


def test_a_config_reaches_every_key_that_must_agree(init):
    _, setup, _ = init(content())
    knobs = setup.knobs(
        {"data_parallel": 4, "model_parallel": 1, "pipeline_stage": 4, "micro_batch_size": 2,
         "use_seq_parallel": False, "pp_interleave_num": 2, "offset": "balanced",
         "recompute": "layers:1/1/0/0", "optimizer_sharding": "none"}
    )  # fmt: skip
    tree = setup.config.merged(setup.config.overrides(knobs))
    parallel, parts = tree["parallel"], tree["parallel_config"]
    assert parallel["dataset_strategy"] == [[4, 1], [4, 1]]
    assert parallel["pipeline_config"] == {
        "pipeline_interleave": True,
        "pipeline_scheduler": "1f1b",
    }
    assert not parallel["enable_parallel_optimizer"]
    assert (parts["data_parallel"], parts["micro_batch_num"]) == (4, 2)
    assert tree["runner_config"]["gradient_accumulation_steps"] == 1  # ignored in a pipeline
    assert tree["recompute_config"]["recompute"] == [1, 1, 0, 0]
    own = tree["model"]["model_config"]
    assert own["pp_interleave_num"] == 2
    assert sum(map(sum, own["offset"])) == 2  # 18 layers over 4 x 2 places
    # The batch is the same by MindFormers' own identity.
    assert MindFormersYaml.of(tree, source="x").batch(16).global_batch_size == 16


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({}, 1 * 2 * 8),
        ({"micro_batch_interleave_num": 2}, 1 * 2 * 8 * 2),
        # Accumulation counts only without a pipeline, micro-batches only with one.
        ({"runner_config__gradient_accumulation_steps": 4}, 1 * 2 * 8),
        ({"parallel_config__pipeline_stage": 1, "runner_config__gradient_accumulation_steps": 4,
          "micro_batch_interleave_num": 2}, 1 * 2 * 4 * 2),
        # Outside of semi-automatic parallelism nothing but the devices counts.
        ({"parallel__parallel_mode": "DATA_PARALLEL"}, 1 * 16),
        ({"use_parallel": False, "runner_config__batch_size": 4}, 4),
    ],
)  # fmt: skip
def test_the_global_batch_follows_mindformers_identity(changes, batch):
    base = MindFormersYaml.of(content(**changes), source="x")
    assert base.batch(16).global_batch_size == batch


def test_without_a_pipeline_the_micro_batches_are_accumulated(init):
    _, setup, _ = init(content())
    flat = {"data_parallel": 8, "model_parallel": 2, "pipeline_stage": 1, "micro_batch_size": 1,
            "offset": "even", "recompute": "full", "use_seq_parallel": True,
            "pp_interleave_num": 1, "optimizer_sharding": "optimizer"}  # fmt: skip
    assert not explain(setup.space, flat).rejected
    tree = setup.config.merged(setup.config.overrides(setup.knobs(flat)))
    assert tree["runner_config"]["gradient_accumulation_steps"] == 2
    assert tree["parallel_config"]["micro_batch_num"] == 1
    assert MindFormersYaml.of(tree, source="x").batch(16).global_batch_size == 16


def test_lists_with_a_row_per_chunk_go_through_and_back(init):
    rows, repeated = [[0, 1, 0, 0], [0, 0, 1, 0]], [[1, 0, 0, 0], [0, 0, 0, 1]]
    chunks = {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}
    code, setup, told = init(
        content(
            parallel__pipeline_config=chunks,
            model__model_config__pp_interleave_num=2,
            model__model_config__offset=rows,
            recompute_config__recompute=repeated,
        )
    )
    assert code == 0, told
    assert setup.base["offset"] == "0/1/0/0+0/0/1/0"
    assert setup.base["recompute"] == "layers:1/0/0/0+0/0/0/1"
    assert not explain(setup.space, setup.base).rejected
    tree = setup.config.merged(setup.config.overrides(setup.knobs(setup.base)))
    assert tree["model"]["model_config"]["offset"] == rows
    assert tree["recompute_config"]["recompute"] == repeated
    assert tree["parallel"]["pipeline_config"] == chunks


def test_interleaved_parts_belong_to_the_micro_batch(init):
    _, setup, told = init(content(use_legacy=True, micro_batch_interleave_num=2))
    assert setup.base["micro_batch_size"] == 2
    assert "counts all 2 parts" in told
    knobs = setup.knobs({**setup.space.fill(setup.base), "micro_batch_size": 4})
    tree = setup.config.merged(setup.config.overrides(knobs))
    assert tree["runner_config"]["batch_size"] == 2
    assert MindFormersYaml.of(tree, source="x").batch(16).global_batch_size == 32


def test_a_single_device_has_the_knobs_that_act_there(init):
    code, setup, _ = init(content("single.yaml", runner_config__gradient_accumulation_steps=4))
    assert code == 0
    assert set(setup.space.searched) - {"data_workers"} == {"recompute", "prefetch"}
    # MindSpore refuses more workers than there are cores.
    workers = [number for number in (2, 4, 8) if number <= max(2, os.cpu_count() or 1)]
    assert setup.space.choices["data_workers"] == tuple(workers)
    assert setup.space.choices["recompute"] == ("none", "full", "layers:2")
    # LlamaFeedForward: 2/3 of 4 x 64, up to a multiple of 16.
    assert setup.study.model.intermediate_size == 176


def test_what_is_unusual_is_named_and_left_alone(init):
    cases = [
        ({"recompute_config__recompute": True, "recompute_config__select_recompute": ["mul"]},
         "select_recompute = ['mul'] is neither", "recompute"),
        ({"recompute_config__recompute": [3, 2]}, "2 numbers for 4 stages", "recompute"),
        ({"runner_config__sink_mode": True, "runner_config__sink_size": 4,
          "recompute_config__recompute": ["x"]}, "one step in sink_size = 4", "recompute"),
        ({"runner_config__sink_mode": True, "context__device_target": "CPU",
          "recompute_config__recompute": ["x"]}, "many times too long", "recompute"),
        ({"model__model_config__offset": [0, "x", 1, 0]}, "[0, 'x', 1, 0] is neither", "offset"),
        ({"swap_config__swap": True}, "a list names layers", "recompute"),
        ({"model__model_config__pp_interleave_num": 2}, "does not count", "pp_interleave_num"),
        ({"model__model_config__offset": 2, "model__model_config__num_hidden_layers": 16},
         "neither 0 nor a list", "offset"),
        ({"model__model_config__num_hidden_layers": None, "recompute_config__recompute": True,
          "model__model_config__offset": None}, "does not tell num_layers", "offset"),
        ({"parallel__pipeline_config": {"pipeline_interleave": True,
                                        "pipeline_scheduler": "zero_bubble_v"}},
         "two micro-batches per stage", "pp_interleave_num"),
    ]  # fmt: skip
    for changes, note, knob in cases:
        code, setup, told = init(content(**changes))
        assert code == 0, (changes, told)
        assert note in told, (changes, told)
        assert knob not in setup.space.choices, changes
    assert setup.study.constraints.min_micro_batches_per_stage == 2


def test_what_trials_leave_out_of_the_yaml_is_named(init):
    _, _, told = init(content())
    assert "in trials" not in told
    _, _, told = init(content(load_checkpoint="ckpt", resume_training=True))
    assert "load_checkpoint is left out in trials" in told
    assert "resume_training is off in trials" in told


def test_degrees_need_graph_mode_and_pynative_is_named(init, tmp_path):
    asked = content(context__mode=1)
    code, setup, said = init(asked)
    assert (code, setup) == (2, None)
    assert "context.mode must be 0 (graph mode) for semi-automatic parallelism" in said
    assert "set context.mode: 0, or parallel.parallel_mode: 0" in said
    code, _, said = init(content(context__mode="eager"))
    assert code == 2
    assert "context.mode must be one of 0, GRAPH_MODE, 1, PYNATIVE_MODE, but got 'eager'" in said
    # Changed after `init`, it is refused by the search as well, with and without our callback.
    _, setup, _ = init(content(context__mode="GRAPH_MODE"))
    study = yaml.safe_load(setup.path.read_text())
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(asked))
    for callback in ("mindformers", None):
        study["trial"]["callback"] = callback
        setup.path.write_text(yaml.safe_dump(study))
        with pytest.raises(ConfigError, match=r"context\.mode must be 0 \(graph mode\)"):
            load_study(setup.path)
    # A production run of a file that was edited after its export.
    tuned = {**asked, "mindtune": {"schema": 1, "command": ["python", "train.py"]}}
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(tuned))
    with pytest.raises(ConfigError, match=r"tuned.yaml: context\.mode must be 0"):
        read_best_config(tmp_path / "tuned.yaml")
    code, _, said = init(content("single.yaml", context__mode=1))
    assert code == 0
    assert "context.mode is PyNative: trials and the production run train in it" in said


def test_context_parallelism_stays_within_what_its_algorithm_allows(init):
    half = {"parallel_config__data_parallel": 1, "parallel_config__context_parallel": 2,
            "parallel__dataset_strategy": [[1, 1], [1, 1]]}  # fmt: skip
    _, setup, _ = init(content(**half))
    assert setup.space.choices["context_parallel"] == (1, 2, 4, 8, 16)
    _, setup, told = init(content(**half, parallel_config__context_parallel_algo="ulysses_cp"))
    # 4 heads of keys and values over 2 x model_parallel.
    assert setup.space.choices["model_parallel"] == (1, 2)
    assert setup.space.choices["context_parallel"] == (2,)
    assert "splits heads" in told
    hybrid = {"parallel_config__context_parallel_algo": "hybrid_cp",
              "parallel_config__ulysses_degree_in_cp": 2}  # fmt: skip
    _, setup, _ = init(content(**half, **hybrid))
    assert setup.space.choices["context_parallel"] == (1, 2, 4, 8, 16)


def test_a_yaml_that_our_rules_reject_is_told_so(init):
    code, _, told = init(content(parallel_config__micro_batch_num=2))
    assert code == 0
    assert "The YAML itself is rejected" in told
    assert "micro_batch_num = 2 must be at least pipeline_stage = 4" in told


def test_experts_may_lie_in_tensor_groups_and_need_sequence_parallelism(init):
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
    changes = {f"model__model_config__{name}": value for name, value in experts.items()}
    code, setup, _ = init(content(parallel_config__expert_parallel=4, **changes))
    assert code == 0
    assert setup.study.model.num_experts == 16
    assert not explain(setup.space, setup.base).rejected
    without = explain(setup.space, {**setup.base, "use_seq_parallel": False}).rejected
    assert [entry.rule for entry in without] == ["experts_need_sequence_parallel"]


def test_devices_are_taken_from_the_degrees_or_asked_for(init):
    code, _, told = init(content(), "--devices", "8")
    assert (code, "which is 16, but got 8" in told) == (2, True)
    shared = content("single.yaml", use_parallel=True, parallel={"parallel_mode": 0})
    code, _, told = init(shared)
    assert (code, "--devices" in told) == (2, True)
    code, setup, _ = init(shared, "--devices", "4")
    assert (code, setup.study.training.global_batch_size) == (0, 16)


def test_a_yaml_may_have_any_name(tmp_path):
    base, out = tmp_path / "new\nline: \u6a21\u578b.yaml", tmp_path / "study.yaml"
    base.write_bytes((HERE / "single.yaml").read_bytes())
    assert main(["init", "--mindformers", str(base), str(out)]) == 0
    assert load_study(out).study.trial.base_config == base.name


ODD = (None, 0, 2, -1, True, "x", "", [], [1, 2, 3, 4], [[1, 0], [0, 1]], {"a": 1}, 1.5, 10**12)


def entries(node):
    """Yield every place of a tree: container and key."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield node, key
        if isinstance(node[key], (dict, list)):
            yield from entries(node[key])


@pytest.mark.parametrize("seed", range(6))
def test_whatever_stands_in_a_yaml_the_study_loads_or_the_yaml_is_refused(tmp_path, seed):
    draw = random.Random(seed)
    written, refusals = 0, []
    for _ in range(12):
        tree = content(draw.choice(["pipeline.yaml", "single.yaml"]))
        node, key = draw.choice(list(entries(tree)))
        node[key] = draw.choice(ODD)
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(tree))
        out = tmp_path / "study.yaml"
        out.unlink(missing_ok=True)
        try:
            write_study(tmp_path / "base.yaml", out)
        except ConfigError as error:
            refusals.append((str(error), out.exists()))
        else:
            written += 1
            load_study(out)
    assert all("base.yaml" in told and not exists for told, exists in refusals), refusals
    assert written > len(refusals)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"training": {"lr": 1}}, "must be a MindFormers YAML"),
        ([1, 2], "must be a MindFormers YAML"),
        (content(parallel__parallel_mode=7), "parallel.parallel_mode must be one of"),
        (content(parallel_config__pipeline_stage=0), "must be a whole number of at least 1"),
        (content(model=["x"]), "model must be a section of keys"),
        (
            content("single.yaml", train_dataset__prefetch_size=10**12),
            "base.yaml is not valid: space prefetch must be a whole number of at most",
        ),
    ],
)
def test_what_is_not_mindformers_is_refused_and_nothing_written(init, tmp_path, tree, told):
    code, _, said = init(tree)
    assert code == 2
    assert told in said
    assert [path.name for path in tmp_path.iterdir()] == ["base.yaml"]
