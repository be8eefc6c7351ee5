"""The READMEs' YAML examples are valid as they stand; their Python runs in tests/live."""

from pathlib import Path

import pytest
import yaml

from mindtune.controller.contract import StudyFile, parse, read_document
from mindtune.controller.contract.gate_file import GateFile
from mindtune.controller.live.settings import load_settings
from mindtune.controller.trials.preflight import check_policies
from mindtune.controller.trials.study_setup import study_facts
from mindtune.search.constraints import check
from mindtune.search.space import Space

ROOT = Path(__file__).parents[2]
STUDY_SAMPLE = ROOT / "controller" / "contract" / "samples" / "study.yaml"
READMES = ("README.md", "README.zh.md")


def examples(name, kind):
    text = (ROOT / name).read_text(encoding="utf-8")
    return [part.split("```")[0] for part in text.split(f"```{kind}\n")[1:]]


@pytest.mark.parametrize("name", READMES)
def test_yaml_examples_are_valid(name, tmp_path):
    keys = set()
    for example in examples(name, "yaml"):
        path = tmp_path / "example.yaml"
        path.write_text(example, encoding="utf-8")
        content = yaml.safe_load(example)
        keys |= set(content)
        if "rules" in content:
            assert read_document(GateFile, path).rules
        elif content.keys() & {"space", "overrides"}:
            whole = "study" in content
            sample = {} if whole else yaml.safe_load(STUDY_SAMPLE.read_text(encoding="utf-8"))
            study = parse(StudyFile, {**sample, **content}, source=name)
            report = check(Space.from_spec(study.space, study_facts(study, None)))
            assert report.feasible
        elif "trial" in content:
            sample = yaml.safe_load(STUDY_SAMPLE.read_text(encoding="utf-8"))
            changed = {key: {**sample[key], **section} for key, section in content.items()}
            assert parse(StudyFile, {**sample, **changed}, source=name).trial.hosts
        else:
            content.pop("callbacks", None)
            load_settings(content, {})
    assert keys == {"callbacks", "mindtune", "rewind", "alerts", "faults", "rules", "schema",
                    "space", "constraints", "overrides", "trial", "cluster", "study", "training"}  # fmt: skip


def test_the_sample_of_a_study_names_settings_that_exist():
    check_policies(read_document(StudyFile, STUDY_SAMPLE).policies)


def test_both_languages_show_the_same_examples():
    def code(name, kind):
        lines = "".join(examples(name, kind)).splitlines()
        return [kept for line in lines if (kept := line.split(" #")[0].rstrip())]

    for kind in ("python", "yaml"):
        assert code("README.md", kind) == code("README.zh.md", kind)
