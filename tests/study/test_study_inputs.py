"""What a study is made of: base config, overrides, storages, and refusals before anything runs."""

import sqlite3
import sys

import pytest
import sqlalchemy.exc
import yaml

from mindtune.controller.config_tree import get_key, set_key
from mindtune.controller.contract import KnobsFile, TrialPlan, read_document, write_json
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials import identity
from mindtune.controller.trials.identity import study_identity
from mindtune.controller.trials.peak import PeakFile, needs_measuring, resolve_peak
from mindtune.controller.trials.storage import open_storage, storage_address, storage_errors
from mindtune.controller.trials.study_folder import StudyFolder, relocated, relocated_command
from mindtune.controller.trials.study_runner import run_study
from mindtune.controller.trials.study_setup import load_study, read_candidates
from mindtune.policies.errors import PolicyError
from mindtune.search.constraints import check
from mindtune.search.layout import num_ranks

PLAN = TrialPlan(number=3, warmup_steps=2, measure_steps=8, deadline_s=20.0)


# The base config and the overrides


def test_trial_finds_its_config_with_the_overrides_and_nothing_else(tiny):
    setup = load_study(tiny.write(base={"other": {"kept": [1, None]}}))
    own = (tiny.folder / "base.yaml").read_bytes()
    folder = tiny.folder / "trial"
    knobs = setup.knobs({"micro_batch_size": 4, "recompute": "none"})
    path = setup.config.write(folder, knobs, PLAN)
    written = yaml.safe_load(path.read_text())
    base = yaml.safe_load(own)
    assert written["training"] == {"micro_batch_size": 4, "recompute": False}
    assert {**written, "training": None} == {**base, "training": None}
    document = read_document(KnobsFile, folder / "knobs.yaml")
    assert document.knobs == {"micro_batch_size": 4, "recompute": "none", "micro_batch_num": 4}
    assert document.trial == PLAN
    assert (tiny.folder / "base.yaml").read_bytes() == own


def test_base_knobs_are_read_back_through_the_overrides(tiny):
    setup = load_study(tiny.write())
    assert setup.base == {"micro_batch_size": 1, "recompute": "full"}


def test_null_in_the_base_config_leaves_the_knob_to_the_program(tiny):
    base = {"training": {"micro_batch_size": None, "recompute": True}}
    assert load_study(tiny.write(base=base)).base == {"recompute": "full"}
    # The values of this one are spelled in a way of its own.
    base = {"training": {"micro_batch_size": 1, "recompute": None}}
    assert load_study(tiny.write(base=base)).base == {"micro_batch_size": 1}


def test_environment_knobs_reach_the_environment(tiny, monkeypatch):
    monkeypatch.setenv("TINY_THREADS", "7")
    space = {"micro_batch_size": [1, 2], "env.TINY_THREADS": ["1", "2"]}
    setup = load_study(tiny.write(space=space))
    assert setup.base["env.TINY_THREADS"] == "7"
    assert setup.config.environment({"env.TINY_THREADS": "2"}) == {"TINY_THREADS": "2"}


def test_derived_and_created_keys(tiny):
    overrides = {
        "training.micro_batch_size": "micro_batch_size",
        "training.steps.accumulate": {"knob": "micro_batch_num", "create": True},
        "training.batch": {"knob": "global_batch_size", "create": True},
    }
    setup = load_study(tiny.write(overrides=overrides, space={"micro_batch_size": [1, 4]}))
    changes = setup.config.overrides(setup.knobs({"micro_batch_size": 4}))
    assert changes == {
        "training.micro_batch_size": 4,
        "training.steps.accumulate": 4,
        "training.batch": 16,
    }
    assert setup.config.merged(changes)["training"]["steps"] == {"accumulate": 4}


def test_key_that_the_base_config_lacks_is_refused_with_near_misses(tiny):
    study = tiny.write(overrides={"training.micro_batch": "micro_batch_size"})
    with pytest.raises(ConfigError, match=r"did you mean training\.micro_batch_size"):
        load_study(study)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"base": {"training": {"micro_batch_size": "many", "recompute": True}}},
         r"micro_batch_size must be a whole number of at least 1, but got 'many'"),
        ({"base": {"training": {"micro_batch_size": 1, "recompute": "maybe"}}},
         r"must stand for a value of recompute \(none: False, full: True\), but got 'maybe'"),
        ({"space": {"recompute": ["none", "interval:2"]}},
         r"must spell every value of recompute, but interval:2 is not among none, full"),
        ({"overrides": {"training.micro_batch_size": "micro_batch_size",
                        "training.recompute": "micro_batch_size"}},
         r"micro_batch_size must be a whole number"),
        ({"trial": {"command": ["python", "gone.py"]}}, r"gone.py"),
        ({"trial": {"base_config": "gone.yaml"}}, r"gone.yaml must exist"),
        ({"trial": {"load_checkpoint": "gone.ckpt"}}, r"load_checkpoint must exist"),
        ({"space": {"candidates": "gone.csv"}}, r"gone.csv must be a readable CSV"),
        ({"study": {"trails": 3}}, r"unknown key 'trails' at study; allowed: name, trials"),
        ({"trial": {"deadline": "10 parsecs"}}, r"must be a duration"),
        ({"study": {"storage": "postgresql://u:secret@h:port/n"}}, r"study\.storage must be null"),
        ({"study": {"storage": "postgresql://u:se@cret@h/n"}}, r"must have its @ written as %40"),
        ({"study": {"storage": "sqlite:///a\0b.db"}}, r"study\.storage must be null"),
        ({"overrides": {"a": {"knob": "recompute", "create": True},
                        "a.b": {"knob": "micro_batch_size", "create": True}}},
         r"must lie beside each other, but 'a\.b' lies inside 'a'"),
        ({"overrides": {"list.\u00b2": "micro_batch_size"}, "base": {"list": [1, 2, 3]}},
         r"must exist in"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_with_nothing_written(tiny, sections, message):
    tiny.write(**sections)
    with pytest.raises(ConfigError, match=message):
        run_study(tiny.study_file, tiny.out)
    assert not tiny.out.exists()


def test_wrong_policy_settings_are_refused_before_the_first_trial(tiny):
    tiny.write(policies={"gradient_nrom": {"enabled": True}})
    with pytest.raises(PolicyError, match="gradient_nrom"):
        run_study(tiny.study_file, tiny.out)
    assert not tiny.out.exists()


def test_keys_may_be_numbers_and_list_indices():
    tree = {"layers": [{"size": 1}, {"size": 2}], 3: "three"}
    set_key(tree, "layers.1.size", 5, source="x")
    set_key(tree, "3", "drei", source="x")
    assert tree == {"layers": [{"size": 1}, {"size": 5}], 3: "drei"}
    assert get_key(tree, "layers.0", source="x") == {"size": 1}
    with pytest.raises(ConfigError, match="must exist in x, but '2' does not"):
        get_key(tree, "layers.2.size", source="x")
    set_key(tree, "3", "trois", source="x", create=True)
    set_key(tree, "5.6", True, source="x", create=True)
    set_key(tree, "5.6", False, source="x", create=True)
    assert tree == {"layers": [{"size": 1}, {"size": 5}], 3: "trois", "5": {"6": False}}
    nested = {1: {2: {"a": 0}}}
    set_key(nested, "1.2.b", 3, source="x", create=True)
    assert nested == {1: {2: {"a": 0, "b": 3}}}
    with pytest.raises(ConfigError, match=r"lead through sections of x, but .*'b'.* is a str"):
        set_key(tree, "3.b", 1, source="x", create=True)


def test_number_of_ranks_is_the_product_of_the_degrees():
    assert num_ranks({"data_parallel": 2, "model_parallel": 4, "expert_parallel": 2}) == 8
    assert num_ranks({}) == 1


def test_candidates_come_from_csv_and_yaml(tmp_path):
    table = tmp_path / "layouts.csv"
    table.write_text("micro_batch_size,recompute\n1,full\n4,none\n")
    assert read_candidates(table) == [
        {"micro_batch_size": "1", "recompute": "full"},
        {"micro_batch_size": "4", "recompute": "none"},
    ]
    table.write_text("micro_batch_size,recompute\n1\n")
    with pytest.raises(ConfigError, match="line 2 must have as many cells"):
        read_candidates(table)
    listed = tmp_path / "layouts.yaml"
    listed.write_text("- {micro_batch_size: 1}\n- {micro_batch_size: 2}\n")
    assert read_candidates(listed) == [{"micro_batch_size": 1}, {"micro_batch_size": 2}]
    listed.write_text("micro_batch_size: 1\n")
    with pytest.raises(ConfigError, match="must hold a list of configs"):
        read_candidates(listed)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "micro_batch_size,micro_batch_size\n1,2\n", "must name each knob once"),
        ("a.yaml", "- {1: 2}\n", "must hold a list of configs"),
        ("a.yaml", "- {}\n", "must hold a list of configs"),
        ("a\0b.csv", None, "must be a readable CSV file"),
    ],
    ids=range(4),
)
def test_wrong_candidates_are_refused(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_candidates(tmp_path / name)


def test_candidates_of_a_spreadsheet_are_read(tmp_path):
    table = tmp_path / "layouts.csv"
    table.write_bytes("\ufeffmicro_batch_size,recompute\r\n1,full\r\n".encode())
    assert read_candidates(table) == [{"micro_batch_size": "1", "recompute": "full"}]


def test_an_unusual_base_config_goes_through_a_whole_study(tiny):
    tiny.write(
        study={"trials": 1},
        trial={
            "repeats": 1,
            "command": ["python", "tiny_trial.py", "x" * 5000, "--config", "{config}"],
        },
    )
    base = tiny.folder / "base.yaml"
    extra = "twice: 1\ntwice: 2\nday: 2020-01-01\n1: a\nnull: b\n? 2020-01-01\n: c\n"
    base.write_text(base.read_text() + extra)
    result = run_study(tiny.study_file, tiny.out)
    assert result.best_config is not None
    seen = yaml.safe_load((tiny.out / "trials/0000/repeat_0/config.yaml").read_text())
    assert seen["twice"] == 2


@pytest.mark.parametrize("name", ["{config}", "a?b=c&d#e%41", "new\nline", "[red] 'x\u4e2d"])
def test_a_study_lies_in_a_folder_of_any_name(tiny, name):
    tiny.write(study={"trials": 1}, trial={"repeats": 1})
    out = tiny.folder / name
    assert run_study(tiny.study_file, out).best_config == out / "best_config.yaml"
    assert (out / "study.db").stat().st_size > 0
    assert len(tiny.log()) == 2
    run_study(tiny.study_file, out)
    assert len(tiny.log()) == 2, "what finished runs once"


def test_a_folder_that_is_no_text_is_refused_and_left_alone(tiny):
    tiny.write()
    out = tiny.folder / "\udcff"
    with pytest.raises(ConfigError, match="a name in UTF-8"):
        run_study(tiny.study_file, out)
    assert not out.exists()


def test_paths_are_moved_with_the_file_that_names_them(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.py").touch()
    old, new = tmp_path / "a", tmp_path / "b" / "c"
    assert relocated("base.yaml", old=old, new=new) == "../../a/base.yaml"
    assert relocated("/x/base.yaml", old=old, new=new) == "/x/base.yaml"
    command = ["python", "train.py", "--config", "{config}"]
    assert relocated_command(command, old=old, new=new)[1] == "../../a/train.py"
    assert relocated_command(command, old=old, new=new)[2:] == ["--config", "{config}"]


# The storage and the folder


def break_header(path):
    path.write_bytes(b"this is no database, whatever its name says" * 100)


def break_pages(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE studies (name TEXT)")
        connection.executemany("INSERT INTO studies VALUES (?)", [("x" * 900,)] * 40)
    connection.close()
    content = bytearray(path.read_bytes())
    content[4096 + 8 : 4096 + 2000] = b"\xa5" * 1992
    path.write_bytes(content)


def other_tables(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_header, "must be SQLite, but it is something else; restore it, or move it away"),
        (break_pages, "must be intact"),
        (other_tables, "must hold studies, but it holds recipes"),
    ],
)
def test_spoilt_database_is_refused_and_left_alone(tiny, spoil, message):
    tiny.write()
    tiny.out.mkdir()
    spoil(tiny.out / "study.db")
    before = (tiny.out / "study.db").read_bytes()
    with pytest.raises(ConfigError, match=message):
        run_study(tiny.study_file, tiny.out)
    assert (tiny.out / "study.db").read_bytes() == before
    left = {path.name for path in tiny.out.iterdir()}
    assert left == {"study.db", ".lock"}
    assert tiny.log() == []


def test_locked_database_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("mindtune.controller.trials.storage._LOCK_WAIT_S", 0.1)
    tiny.out.mkdir()
    path = tiny.out / "study.db"
    open_storage(storage_address(None, tiny.out))
    holder = sqlite3.connect(path)
    try:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ConfigError, match="database is locked; end the process that holds"):
            open_storage(storage_address(None, tiny.out))
    finally:
        holder.close()


def test_file_in_place_of_the_folder_is_refused(tiny):
    tiny.write()
    tiny.out.write_text("in the way")
    with pytest.raises(ConfigError, match=r"must be a writable folder, but: .*; give another"):
        run_study(tiny.study_file, tiny.out)
    assert tiny.out.read_text() == "in the way"
    with pytest.raises(ConfigError, match="must be a writable folder"):
        run_study(tiny.study_file, tiny.out / "below" / "it")


def test_file_in_place_of_the_trials_is_refused_and_left_alone(tiny):
    tiny.write()
    tiny.out.mkdir()
    (tiny.out / "trials").write_text("in the way")
    with pytest.raises(ConfigError, match="must be a writable folder"):
        run_study(tiny.study_file, tiny.out)
    assert {path.name for path in tiny.out.iterdir()} == {"trials"}


def test_password_of_a_storage_is_never_shown(tiny, monkeypatch):
    url = "sqlite:////nowhere/at/all/study.db?key=hunter2"
    address = storage_address(url, tiny.out)
    assert "hunter2" not in address.shown
    assert "hunter2" not in repr(address)
    monkeypatch.setenv("STUDY_URL", "postgresql://user:hunter2@localhost:1/study")
    address = storage_address("env:STUDY_URL", tiny.out)
    assert address.shown == "env:STUDY_URL"
    tiny.write(study={"storage": "env:STUDY_URL"})
    with pytest.raises(ConfigError) as refusal:
        run_study(tiny.study_file, tiny.out)
    assert "hunter2" not in str(refusal.value)
    assert "env:STUDY_URL" in str(refusal.value)
    assert not tiny.out.exists()
    direct = storage_address("postgresql://user:hunter2@localhost:1/study", tiny.out)
    assert direct.shown == "postgresql://user:***@localhost:1/study"


@pytest.mark.parametrize(
    "url",
    ["postgresql://user:a%2fb%20c%40d@localhost/study",
     "postgresql://user@localhost/study?password=a%2Fb+c%40d"],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["a/b c@d", "a%2Fb%20c%40d", "a%2Fb+c%40d", "a/b%20c%40d"])
def test_a_driver_s_words_show_no_password_however_it_is_spelled(tiny, url, spelling):
    address = storage_address(url, tiny.out)
    error = sqlalchemy.exc.SQLAlchemyError(f'"{spelling}" and {url} were refused on port 5432')
    with pytest.raises(ConfigError) as refusal, storage_errors(address):
        raise error
    assert 'but: "***" and postgresql://' in str(refusal.value)
    assert "were refused on port 5432" in str(refusal.value)
    for secret in (spelling, "a%2fb%20c%40d", "a%2Fb+c%40d"):
        assert secret not in str(refusal.value)


def test_a_relative_database_file_is_found_from_everywhere(tiny, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for setting, base, file in (
        ("sqlite:///a.db", None, tmp_path / "a.db"),
        ("sqlite:///a.db", tiny.folder, tiny.folder / "a.db"),
        ("sqlite:///sub/../a.db?timeout=5", tiny.folder, tiny.folder / "a.db"),
        (f"sqlite:///{tmp_path}/b.db", tiny.folder, tmp_path / "b.db"),
    ):
        address = storage_address(setting, tiny.out, base=base)
        assert address.file == file
        assert address.url.startswith(f"sqlite:///{file}")
        assert address.shown.startswith(f"sqlite:///{file}")
        assert ("?timeout=5" in address.url) == ("?timeout" in setting)
    monkeypatch.setenv("STUDY_URL", "sqlite:///a.db")
    # As the shell that has set it means it.
    assert storage_address("env:STUDY_URL", tiny.out, base=tiny.folder).file == tmp_path / "a.db"


def test_storage_settings_that_name_nothing_are_refused(tiny, monkeypatch):
    monkeypatch.delenv("NO_SUCH_URL", raising=False)
    with pytest.raises(ConfigError, match="environment variable NO_SUCH_URL"):
        storage_address("env:NO_SUCH_URL", tiny.out)
    with pytest.raises(ConfigError, match="must be null, a database URL"):
        storage_address("my database", tiny.out)


def test_folder_of_a_study_is_held_by_one_process(tmp_path):
    folder = StudyFolder(tmp_path / "study")
    folder.check_writable()
    one_process = pytest.raises(ConfigError, match="must be used by one process at a time")
    with folder.locked(), one_process, folder.locked():
        pass
    with folder.locked():
        pass


@pytest.mark.parametrize("name", ["study.yaml", "base_config.yaml", "summary.json"])
def test_a_study_writes_over_nothing_that_is_the_user_s(tiny, name):
    out = tiny.folder  # as with `--out .`
    tiny.write()
    if name != "study.yaml":
        tiny.study_file.rename(out / "own.yaml")
        (out / name).write_text("{mine: 1} # and nobody else's")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    study = tiny.study_file if name == "study.yaml" else out / "own.yaml"
    with pytest.raises(ConfigError, match=rf"it holds {name} and no study"):
        run_study(study, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_failed_preparation_removes_only_what_it_added(tmp_path):
    folder = StudyFolder(tmp_path / "study")
    folder.root.mkdir()
    (folder.root / "notes.txt").write_text("mine")

    def prepare():
        with folder.undone_on_failure(folder.topmost_missing()):
            folder.summary.write_text("{}")
            (folder.root / "trials").mkdir()
            raise ConfigError("on purpose")

    with pytest.raises(ConfigError, match="on purpose"):
        prepare()
    assert [path.name for path in folder.root.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("is_new", [True, False])
def test_failed_preparation_leaves_who_has_joined_meanwhile_alone(tmp_path, is_new):
    folder = StudyFolder(tmp_path / "studies" / "study")
    if not is_new:
        folder.root.mkdir(parents=True)
    created = folder.topmost_missing()
    folder.check_writable()

    def prepare():
        with folder.locked(), folder.undone_on_failure(created):
            folder.summary.write_text("{}")
            (folder.root / "workers" / "host_7").mkdir(parents=True)
            raise ConfigError("on purpose")

    with pytest.raises(ConfigError, match="on purpose"):
        prepare()
    left = {path.name for path in folder.root.iterdir()}
    assert left == {"workers"} if is_new else {"workers", ".lock"}
    assert (folder.root / "workers" / "host_7").is_dir()


# The peak

MODEL = {
    "num_layers": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "vocab_size": 8,
    "seq_length": 8,
}  # fmt: skip


def resolved(tiny, **sections):
    tiny.write(**sections)
    folder = StudyFolder(tiny.out)
    folder.check_writable()
    return resolve_peak(load_study(tiny.study_file).study, folder)


def test_peak_is_given_looked_up_or_unknown_and_says_so(tiny):
    given = resolved(tiny, model=MODEL, cluster={"peak_flops": "3e12"})
    assert (given.flops_per_device, given.source) == (3e12, "the study file")
    table = {"device": "A100-SXM4-80GB", "peak_flops": None}
    known = resolved(tiny, model=MODEL, cluster=table, training={"precision": "bfloat16"})
    assert known.flops_per_device == 312e12
    unknown = resolved(tiny, model=MODEL, cluster={"device": "Abacus 3000", "peak_flops": None})
    assert unknown.flops_per_device is None
    assert "no peak is known" in unknown.source


def test_peak_that_was_measured_is_kept_with_the_study(tiny):
    cluster = {"peak_flops": "measure", "num_devices": 2}
    tiny.write(model=MODEL, cluster=cluster)
    folder = StudyFolder(tiny.out)
    folder.check_writable()
    assert needs_measuring(load_study(tiny.study_file).study, folder)
    stored = PeakFile(
        flops_per_device=5e10, precision="float32", device="some cpu", source="measured: here",
        setting="measure", num_devices=2, spread=0.1,
    )  # fmt: skip
    write_json(folder.peak, stored)
    assert resolved(tiny, model=MODEL, cluster=cluster) == stored
    # Half as many ranks share the host: another peak each.
    tiny.write(model=MODEL, cluster={**cluster, "num_devices": 1})
    assert needs_measuring(load_study(tiny.study_file).study, folder)


def test_measuring_is_for_the_host_and_for_a_model_only(tiny):
    with pytest.raises(ConfigError, match="cluster.device must be cpu, but got 'Ascend910B'"):
        resolved(tiny, model=MODEL, cluster={"peak_flops": "measure", "device": "Ascend910B"})
    peak = resolved(tiny, cluster={"peak_flops": "measure", "device": "cpu"})
    assert peak.flops_per_device is None
    assert "without a model" in peak.source


def test_the_peak_of_this_machine_is_not_that_of_slurm_s_nodes(tiny):
    with pytest.raises(ConfigError, match="`srun mindtune doctor --measure` prints there"):
        resolved(tiny, model=MODEL, cluster={"peak_flops": "measure"}, trial={"launcher": "slurm"})


def test_a_remote_shell_may_be_a_file_beside_the_study(tiny):
    (tiny.folder / "shell.sh").touch()
    path = tiny.write(
        trial={"launcher": "msrun", "hosts": ["here", "there"],
               "remote_shell": ["./shell.sh", "-F", "shell.sh", "-q"]},
        cluster={"num_devices": 2, "devices_per_node": 1},
    )  # fmt: skip
    script = str(tiny.folder / "shell.sh")
    assert load_study(path).hosts.shell == (script, "-F", script, "-q")


def test_code_of_a_module_counts_but_none_of_it_is_imported(tiny, monkeypatch):
    package = tiny.folder / "users_package"
    (package / "job").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    for name in ("__init__", "__main__"):
        (package / "job" / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tiny.folder))
    command = ["python", "-m", "users_package.job", "--config", "{config}"]
    path = tiny.write(trial={"command": command})
    part = "the program's code"
    before = study_identity(load_study(path)).parts[part]
    assert study_identity(load_study(path)).parts[part] == before
    (package / "job" / "__main__.py").write_text("pass\n")
    assert study_identity(load_study(path)).parts[part] != before
    assert "users_package" not in sys.modules


def test_what_a_script_imports_from_its_folder_counts(tiny):
    (tiny.folder / "train.py").write_text(
        "import json\nfrom model import Net\nimport parts.data.text as text\nx = '\\d'\n"
    )
    (tiny.folder / "model.py").write_text("from layers import dense\nimport model\n")
    for package in ("layers", "parts/data"):
        (tiny.folder / package).mkdir(parents=True)
    for name in ("layers/__init__", "layers/dense", "parts/data/text", "plots"):
        (tiny.folder / f"{name}.py").write_text("raise SystemExit('imported')\n")
    path = tiny.write(trial={"command": ["python", "train.py", "--config", "{config}"]})

    def code():
        return study_identity(load_study(path)).parts["the program's code"]

    known = {code()}
    for name in ("model", "layers/dense", "parts/data/text", "train"):
        with (tiny.folder / f"{name}.py").open("a") as source:
            source.write("pass\n")
        assert code() not in known, name
        known.add(code())
    (tiny.folder / "plots.py").write_text("pass\n")
    assert code() in known, "nothing imports it"
    (tiny.folder / "model.py").write_text("no Python at all\n")
    assert code() not in known


def test_scripts_of_one_name_are_told_apart(tiny):
    for name in ("a", "b"):
        (tiny.folder / name).mkdir()
        (tiny.folder / name / "run.py").write_text(f"'{name}'\n")
    command = ["python", "a/run.py", "b/run.py", "{config}"]
    path = tiny.write(trial={"command": command})
    before = study_identity(load_study(path)).parts
    (tiny.folder / "a" / "run.py").write_text("'c'\n")
    assert study_identity(load_study(path)).parts != before


def test_another_checkpoint_under_the_same_name_is_another_study(tiny):
    folder = tiny.folder / "checkpoint"
    folder.mkdir()
    content = bytearray(10 * 2**20)
    (folder / "model.ckpt").write_bytes(content)
    path = tiny.write(trial={"load_checkpoint": "checkpoint"})

    def parts():
        return study_identity(load_study(path)).parts

    before = parts()
    assert parts() == before
    for begin in range(0, len(content), 4096):
        content[begin] = 1  # as training changes all of it
    (folder / "model.ckpt").write_bytes(content)
    changed = parts()
    assert [name for name in before if changed[name] != before[name]] == [
        "the checkpoint's content"
    ]
    (folder / "extra.ckpt").touch()
    assert parts() not in (before, changed)


def test_mindformers_and_what_it_registers_count_where_it_trains(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(identity, "installed_versions", lambda names: asked.append(names) or {})
    study_identity(load_study(tiny.write()))
    path = tiny.write(constraints={"framework": "mindformers"})
    before = study_identity(load_study(path)).parts
    assert ["mindformers" in names for names in asked] == [False, True]
    # And so do the modules that it registers.
    (tiny.folder / "mine").mkdir()
    monkeypatch.setenv("REGISTER_PATH", str(tiny.folder / "mine"))
    assert study_identity(load_study(path)).parts == before
    (tiny.folder / "mine" / "model.py").touch()
    assert study_identity(load_study(path)).parts != before


def test_with_slurm_ranks_of_several_nodes_fill_them(tiny):
    for launcher, feasible in (("slurm", 2), ("none", 3)):
        tiny.write(
            trial={"launcher": launcher},
            cluster={"num_devices": 16, "devices_per_node": 8, "allow_idle": True},
            training={"global_batch_size": 48},
            space={"data_parallel": [6, 12, 16], "micro_batch_size": 1, "recompute": "full"},
        )
        report = check(load_study(tiny.study_file).space)
        assert report.feasible == feasible
        counts = {rule.rule: rule.count for rule in report.rejected}
        assert counts["ranks_fill_nodes"] == 3 - feasible
