"""Every document: committed schema, committed sample, round trip, refusals."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from mindtune.controller.contract import (
    CompareOutput,
    GateFile,
    StudyFile,
    TrialResult,
    parse,
    read_document,
    read_json,
    read_yaml,
    write_atomic,
    write_json,
    write_yaml,
)
from mindtune.controller.contract.base import ContractModel
from mindtune.controller.contract.goals_file import GoalsFile
from mindtune.controller.contract.schemas import DOCUMENTS, FOLDER, schema_of
from mindtune.controller.errors import ConfigError

SAMPLES = FOLDER.parent / "samples"


def sample_documents(name):
    """Return the plain content of each sample of a document."""
    path = next(SAMPLES.glob(f"{'decisions' if name == 'decision' else name}.*"))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return [read_yaml(path) if path.suffix == ".yaml" else read_json(path)]


@pytest.mark.parametrize("name", [*DOCUMENTS, "signals"])
def test_committed_schema_is_the_models_schema(name):
    committed = json.loads((FOLDER / f"{name}.json").read_text())
    assert committed == schema_of(name), "run: python -m mindtune.controller.contract.schemas"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sample_round_trips_and_obeys_the_committed_schema(name):
    for content in sample_documents(name):
        document = DOCUMENTS[name].model_validate(content)
        text = document.model_dump_json(by_alias=True)
        assert DOCUMENTS[name].model_validate_json(text) == DOCUMENTS[name].model_validate_json(
            document.model_dump_json(by_alias=True)
        )
        written = json.loads(text, parse_constant=lambda word: pytest.fail(f"bare {word}"))
        jsonschema.validate(written, json.loads((FOLDER / f"{name}.json").read_text()))
        again = DOCUMENTS[name].model_validate(written)
        assert again.model_dump_json(by_alias=True) == text


@pytest.mark.parametrize("name", [n for n, m in DOCUMENTS.items() if m is not CompareOutput])
def test_unknown_key_is_refused_with_the_allowed_keys(name):
    content = {**sample_documents(name)[0], "colour": "blue"}
    with pytest.raises(ConfigError) as refused:
        parse(DOCUMENTS[name], content, source="a file")
    model = DOCUMENTS[name]
    first = next(f.alias or n for n, f in model.model_fields.items())
    assert "unknown key 'colour' at the top level; allowed: " in str(refused.value)
    assert first in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [n for n in DOCUMENTS if n not in ("compare_output", "decision", "model_signals", "profile")],
)
def test_another_schema_version_is_refused(name):
    content = sample_documents(name)[0]
    with pytest.raises(ConfigError, match="schema"):
        parse(DOCUMENTS[name], {**content, "schema": 2}, source="a file")


def study_with(**changes):
    content = sample_documents("study")[0]
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        if key:
            content[section] = {**content[section], key: value}
        else:
            content[section] = value
    return content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster__device_memory": "64GB/s"}, "cluster.device_memory must be a size such as"),
        ({"cluster__intra_node_bandwidth": "50GB"}, "must be a rate such as 50GB/s"),
        ({"study__time_budget": "2 fortnights"}, "must be a duration such as 90s"),
        ({"trial__deadline": -3}, "must be a positive duration"),
        ({"trial__launcher": "mpirun"}, "trial.launcher: Input should be 'none', 'msrun' or"),
        ({"space": {"tensor_parallel": [1]}}, "knob names must be one of data_parallel"),
        ({"space": {"micro_batch_num": [1]}}, "cannot be searched: it follows from"),
        ({"space": {"recompute": ["interval:0"]}}, "must be interval:K with a whole number K"),
        ({"space": {"gradient_compression": ["topk:2"]}}, "must be topk:R with a ratio R in"),
        ({"space": {"data_parallel": [1, 1]}}, "must list each value once"),
        ({"space": {"data_parallel": []}}, "must list at least one value"),
        ({"space": {"data_parallel": [0]}}, "must be a whole number of at least 1"),
        ({"space": {"data_parallel": True}}, "must be a whole number of at least 1"),
        ({"space": {}}, "must name at least one knob"),
        ({"space": {"candidates": "a.csv", "data_parallel": 1}}, "or knobs alone"),
        ({"trial__hosts": ["n0"]}, "room for num_devices = 64, but 1 hosts of devices_per_node = 8"),
        ({"trial__hosts": ["n0"] * 8}, "must name each host once"),
        ({"trial__hosts": ["n0", "-oProxyCommand=sh"]}, "trial.hosts.1: String should match"),
        ({"trial__hosts": []}, "trial.hosts: List should have at least 1"),
        ({"trial__hosts": list("abcdefgh"), "trial__launcher": "slurm"}, "needs trial.launcher msrun"),
        ({"trial__hosts": list("ab"), "cluster__devices_per_node": None}, "needs cluster.devices_per"),
        ({"trial__remote_shell": []}, "trial.remote_shell"),
        ({"cluster__num_devices": 12}, "must be a multiple of devices_per_node = 8"),
        ({"cluster__peak_flops": "fast"}, "must be a positive number of FLOP/s"),
        ({"cluster__peak_flops": 10**400}, "must be a positive number of FLOP/s"),
        ({"model__num_kv_heads": 5}, "num_heads must be a multiple of num_kv_heads"),
        ({"model__hidden_size": 100}, "hidden_size must be a multiple of num_heads"),
        ({"constraints": {"memory_utilization": 1.5}}, "less than or equal to 1"),
        ({"constraints": {"bubble": 1}}, "at constraints; allowed: memory_utilization,"),
        ({"overrides": {"a.b": "nonsense"}}, "knob names must be one of"),
        ({"policies": {"x": {"mode": "on"}}}, "policies.x.mode: Input should be 'observe'"),
        ({"trial__command": []}, "trial.command"),
        ({"trial__command": ["echo", "a\0b"]}, "must hold words without NUL"),
        ({"study__seed": 10**40}, "study.seed: Input should be less than 2147483648"),
        ({"cluster__num_devices": 10**18}, "less than or equal to 1000000"),
        ({"training__global_batch_size": 2**4000}, "less than or equal to"),
        ({"cluster__device_memory": 64}, "at least 1MB, but got 64 bytes; a number without a unit is"),
        ({"constraints__framework": "torch"}, "constraints.framework"),
        ({"constraints__min_compression": -1}, "constraints.min_compression"),
        ({"cluster__device_memory": "0.1"}, "must be at least 1 byte, a size"),
        ({"score": {"mfu": float("inf")}}, "less than or equal to 100"),
        ({"space": {"recompute": ["interval:inf"]}}, "must be interval:K with a whole number K"),
        ({"space": {"env.X": ["a\0b"]}}, "must be a text without NUL"),
    ],
)  # fmt: skip
def test_wrong_study_is_refused_with_rule_and_value(changes, message):
    with pytest.raises(ConfigError) as refused:
        parse(StudyFile, study_with(**changes), source="study.yaml")
    assert message in str(refused.value)
    assert str(refused.value).startswith("study.yaml is not valid:")
    assert len(str(refused.value)) < 1000


def test_study_values_become_bytes_seconds_and_canonical_knobs():
    study = parse(StudyFile, study_with(space={"recompute": [None, "interval:1"],
                                               "gradient_compression": "TOPK:0.10",
                                               "env.OMP_NUM_THREADS": [1, 2]}), source="s")  # fmt: skip
    assert study.cluster.device_memory == 64 * 2**30
    assert study.cluster.inter_node_bandwidth == 25e9
    assert study.cluster.peak_flops == 313e12
    assert study.study.time_budget == 7200.0
    assert study.space == {
        "recompute": ["none", "full"],
        "gradient_compression": "topk:0.1",
        "env.OMP_NUM_THREADS": ["1", "2"],
    }
    override = study.overrides["parallel.enable_parallel_optimizer"]
    assert override.values == {"none": False, "optimizer": True}


@pytest.mark.parametrize("content", [[1, 2], "text", None, 3])
def test_a_document_that_is_no_mapping_is_refused(content):
    with pytest.raises(ConfigError, match="must hold a mapping of keys"):
        parse(StudyFile, content, source="study.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"outcome": "ok"}, "must carry step_time_s"),
        ({"outcome": "ok", "step_time_s": []}, "must carry step_time_s"),
        ({"outcome": "ok", "step_time_s": [0.1, 0.0]}, "positive finite seconds"),
        ({"outcome": "ok", "step_time_s": [float("nan")]}, "positive finite seconds"),
        ({"outcome": "timeout"}, "outcome: Input should be 'ok', 'oom'"),
        ({}, "outcome is required"),
    ],
)
def test_wrong_trial_result_is_refused(content, message):
    with pytest.raises(ConfigError) as refused:
        parse(TrialResult, content, source="result.json")
    assert message in str(refused.value)


def test_bare_non_finite_numbers_are_read_and_written_as_text(tmp_path):
    path = tmp_path / "result.json"
    path.write_text('{"outcome": "non_finite", "loss": [NaN, Infinity, -Infinity, "nan", 1]}')
    result = read_document(TrialResult, path)
    write_json(path, result)
    assert json.loads(path.read_text())["loss"] == ["nan", "inf", "-inf", "nan", 1.0]


@pytest.mark.parametrize("key", ["max", "last_steps"])
def test_a_truth_value_is_no_number(key):
    rule = {"name": "fast", "signal": "loss", "statistic": "last", "max": 1, key: True}
    with pytest.raises(ConfigError, match=rf"rules\.0\.{key} must be a number, but got True"):
        parse(GateFile, {"rules": [rule]}, source="gate.yaml")
    with pytest.raises(ConfigError, match=r"goals\.mfu must be a number, but got True"):
        parse(GoalsFile, {"goals": {"mfu": True}}, source="goals.yaml")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(ConfigError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_character_is_written_spelled_out(tmp_path):
    write_atomic(tmp_path / "a.txt", "a \ud800")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "a \\ud800"


def test_an_unwritable_folder_is_a_clear_refusal(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match="must be writable"):
        write_atomic(blocker / "sub" / "a.json", "x")


def test_yaml_is_written_with_a_comment_and_reads_back(tmp_path):
    study = DOCUMENTS["best_config"].model_validate(sample_documents("best_config")[0])
    write_yaml(tmp_path / "b.yaml", study, header="how to start it\nsecond line")
    text = (tmp_path / "b.yaml").read_text()
    assert text.startswith("# how to start it\n# second line\n")
    assert read_document(DOCUMENTS["best_config"], tmp_path / "b.yaml") == study


ALIASES_OF_ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
"""Half a kilobyte that stands for 9^11 values."""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [1,\n b: 2", "must be YAML"),
        ("a.json", '{"a": ', "must be JSON"),
        ("a.yaml", b"\xff\xfe\x00x", "must be text in UTF-8"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "must be YAML"),
        ("a.yaml", "a: 1\nb: {c: 1, c: 2}", "line 2 must be YAML, but: the key 'c' stands twice"),
        ("a.yaml", "a: &x {b: *x}", "*x stands inside itself"),
        ("a.yaml", "a: &x [*x]", "*x stands inside itself"),
        ("a.yaml", "a: 2020-13-45", "month must be in 1..12"),
        ("a.yaml", "a: !!bool maybe", "none of the type that its tag names"),
        ("a.yaml", "a: !!int ''", "none of the type that its tag names"),
        ("a.yaml", "a: !!timestamp x", "none of the type that its tag names"),
        ("a.yaml", "a: " + ":".join("1" * 300) + ".5", "none of the type that its tag names"),
        ("a.yaml", ALIASES_OF_ALIASES, "line 8 must be YAML, but: with *a6 it stands for more"),
        ("a.yaml", "a: " + "9" * 5000, "integer string conversion"),
        ("a.yaml", "a: 0x" + "f" * 5000, "integer string conversion"),
        ("a.yaml", "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a.json", "9" * 5000, "integer string conversion"),
        ("a.json", "[" * 100_000, "nested too deeply"),
    ],
    ids=range(18),
)
def test_unreadable_files_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as refused:
        read_document(StudyFile, path)
    assert message in str(refused.value)
    assert name in str(refused.value)


def test_anchors_and_merges_are_read_and_repeated_keys_only_where_asked(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &x {k: 1, l: 1}\nb: &y {<<: *x, k: 2}\nc: {<<: *y, k: 3}\nd: [*x, *x]\n")
    first = {"k": 1, "l": 1}
    merged = {"a": first, "b": {"k": 2, "l": 1}, "c": {"k": 3, "l": 1}, "d": [first, first]}
    assert read_yaml(path) == merged
    path.write_text("a: 1\na: 2\n")
    assert read_yaml(path, repeated_keys=True) == {"a": 2}


def test_a_merged_value_is_a_copy_and_an_alias_is_the_same(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &x {opt: {lr: 1}}\nb: {<<: *x, k: 2}\nc: {<<: [*x], k: 3}\nd: *x\n")
    tree = read_yaml(path)
    tree["b"]["opt"]["lr"] = 9
    assert tree == {
        "a": {"opt": {"lr": 1}}, "b": {"opt": {"lr": 9}, "k": 2}, "c": {"opt": {"lr": 1}, "k": 3},
        "d": {"opt": {"lr": 1}},
    }  # fmt: skip
    tree["a"]["opt"]["lr"] = 7
    assert tree["d"]["opt"]["lr"] == 7
    assert tree["c"]["opt"]["lr"] == 1


def test_a_name_of_a_file_with_nul_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be the name of a file"):
        read_yaml(tmp_path / "a\0b")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must exist"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="it is a folder"):
        read_yaml(tmp_path)


def test_every_contract_model_is_closed_and_frozen():
    seen = set()

    def walk(model):
        for child in model.__subclasses__():
            seen.add(child)
            walk(child)

    walk(ContractModel)
    assert len(seen) > 20
    assert {m.__name__ for m in seen if m.model_config.get("extra") != "forbid"} == {"Provenance"}
    assert all(m.model_config.get("frozen") for m in seen)


def test_samples_are_plain_yaml():
    for path in SAMPLES.glob("*.yaml"):
        assert isinstance(yaml.safe_load(Path(path).read_text()), dict)
