"""Knobs whose values are lists in the user's config: MindFormers' recompute and offset."""

import pytest
import yaml

from mindtune.controller.contract import TrialPlan
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.spelling import Spelling
from mindtune.controller.trials.study_setup import load_study

PLAN = TrialPlan(number=3, warmup_steps=2, measure_steps=8, deadline_s=20.0)
WHOLE = {"none": False, "full": True, "layers:*": "{list}", "selective*": False}
ATTENTION = {"none": False, "full": False, "layers:*": False, "selective": True,
             "selective:*": "{list}"}  # fmt: skip
OVERRIDES = {
    "parallel_config.pipeline_stage": "pipeline_stage",
    "recompute_config.recompute": {"knob": "recompute", "values": WHOLE},
    "recompute_config.select_recompute": {"knob": "recompute", "values": ATTENTION},
    "model.model_config.offset": "offset",
}
MODEL = {"num_layers": 9, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128,
         "vocab_size": 256, "seq_length": 32}  # fmt: skip


def base(recompute, select, offset):
    return {
        "parallel_config": {"pipeline_stage": 4},
        "recompute_config": {"recompute": recompute, "select_recompute": select},
        "model": {"model_config": {"offset": offset}},
    }


def study(tiny, own, space=None):
    recompute = ["none", "full", "selective", [2, 1, 0, 0], "selective:0/0/1/2"]
    return load_study(
        tiny.write(
            base=own,
            overrides=OVERRIDES,
            model=MODEL,
            cluster={"num_devices": 4},
            space=space
            or {"pipeline_stage": 4, "recompute": recompute, "offset": ["balanced", [0, 1, 0, 0]]},
        )
    )


@pytest.mark.parametrize(
    ("recompute", "select", "offset", "knobs"),
    [
        (False, False, 0, {"recompute": "none", "offset": "even"}),
        (True, False, [0, 0, 1, 0], {"recompute": "full", "offset": "0/0/1/0"}),
        (False, True, [0, 0, 1, 0], {"recompute": "selective", "offset": "0/0/1/0"}),
        ([2, 1, 0, 1], False, [1, 0, 0, 0], {"recompute": "layers:2/1/0/1", "offset": "1/0/0/0"}),
        (False, [0, 0, 1, 2], 0, {"recompute": "selective:0/0/1/2", "offset": "even"}),
        ([[1, 0], [0, 1]], False, [[0, 1], [0, 0]],
         {"recompute": "layers:1/0+0/1", "offset": "0/1+0/0"}),
    ],
)  # fmt: skip
def test_mindformers_lists_are_read_and_written_back_as_they_were(
    tiny, recompute, select, offset, knobs
):
    own = base(recompute, select, offset)
    setup = study(tiny, own)
    assert setup.base == {"pipeline_stage": 4, **knobs}
    assert setup.config.merged(setup.config.overrides(setup.base)) == setup.config.base


def test_a_trial_finds_lists_and_the_layers_that_balanced_stands_for(tiny):
    setup = study(tiny, base(True, False, 0))
    config = {"pipeline_stage": 4, "recompute": "layers:2/1/0/0", "offset": "balanced"}
    knobs = setup.knobs(config)
    assert knobs["offset"] == "0/0/1/0"
    written = yaml.safe_load(setup.config.write(tiny.folder / "trial", knobs, PLAN).read_text())
    assert written["recompute_config"] == {"recompute": [2, 1, 0, 0], "select_recompute": False}
    assert written["model"]["model_config"]["offset"] == [0, 0, 1, 0]


def test_keys_that_cannot_mean_one_value_together_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"select_recompute holds True; make them agree"):
        study(tiny, base(True, True, 0))


@pytest.mark.parametrize("value", ["some", 3, [1, "x"], [[1], [2, 3]]])
def test_what_stands_for_no_value_is_refused(tiny, value):
    with pytest.raises(ConfigError, match=r"recompute_config\.recompute"):
        study(tiny, base(value, False, 0))


def test_the_longest_pattern_spells_a_value_and_none_is_an_error():
    spelling = Spelling("recompute", {"none": 0, "s*": 1, "selective:*": "{list}"})
    assert [spelling.write(v) for v in ("none", "selective", "selective:1/2")] == [0, 1, [1, 2]]
    with pytest.raises(KeyError):
        spelling.write("full")
    assert spelling.read([1, 2]) == ("selective:1/2",)
    assert spelling.means(1, "selective")
    assert not spelling.means(1, "full")


def test_a_changed_file_deep_inside_a_package_is_another_study(tiny, monkeypatch):
    from mindtune.controller.trials.identity import study_identity

    package = tiny.folder / "trainer"
    (package / "models").mkdir(parents=True)
    for file in ("__init__.py", "__main__.py", "models/__init__.py", "models/gpt.py"):
        (package / file).write_text("")
    monkeypatch.syspath_prepend(str(tiny.folder))
    command = {"command": ["python", "-m", "trainer", "{config}"]}

    def code():
        return study_identity(load_study(tiny.write(trial=command))).parts["the program's code"]

    before = code()
    assert code() == before
    (package / "models" / "gpt.py").write_text("width = 2\n")
    assert code() != before


def test_a_constraint_that_came_later_changes_no_study_that_leaves_it_unset(tiny):
    from mindtune.controller.trials.identity import study_identity

    def constraints(**section):
        return study_identity(load_study(tiny.write(constraints=section))).parts["constraints"]

    # As a study with this limit was hashed before any further key existed.
    assert constraints(memory_utilization=0.85) == "ef68e2f330ceb9d3"
    assert constraints(memory_utilization=0.85, vocab_divisible=False) == "ef68e2f330ceb9d3"
    assert constraints(memory_utilization=0.85, vocab_divisible=True) != "ef68e2f330ceb9d3"
    assert constraints(memory_utilization=0.85, framework="other") != "ef68e2f330ceb9d3"
