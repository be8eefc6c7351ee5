"""A folder with a study of the tiny trial program, whose best config is known."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import yaml

PROGRAM = Path(__file__).with_name("tiny_trial.py")

STUDY = {
    "schema": 1,
    "study": {"name": "tiny", "trials": 20, "seed": 0},
    "trial": {
        "command": ["python", "tiny_trial.py", "--config", "{config}"],
        "base_config": "base.yaml",
        "warmup_steps": 2,
        "measure_steps": 8,
        "confirm_steps": 1,
        "repeats": 2,
        "startup_deadline": "20s",
        "deadline": "20s",
    },
    "cluster": {"num_devices": 1},
    "training": {"global_batch_size": 16},
    "space": {"micro_batch_size": [1, 2, 3, 4], "recompute": ["none", "full"]},
    "overrides": {
        "training.micro_batch_size": "micro_batch_size",
        "training.recompute": {"knob": "recompute", "values": {"none": False, "full": True}},
    },
}


class Tiny:
    """The folder, with what its trials have logged."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out"
        self.log_file = folder / "log.txt"

    @property
    def study_file(self):
        return self.folder / "study.yaml"

    def write(self, *, base=None, behaviour=None, **sections):
        study = copy.deepcopy(STUDY)
        for name, section in sections.items():
            if isinstance(section, dict) and name not in ("space", "overrides"):
                study.setdefault(name, {}).update(section)
            else:
                study[name] = section
        config = {
            "log": str(self.log_file),
            "behaviour": behaviour or {},
            "training": {"micro_batch_size": 1, "recompute": True},
            **(base or {}),
        }
        self.study_file.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
        (self.folder / "base.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return self.study_file

    def log(self, kind="start"):
        """Return the logged lines of a kind, each as its words."""
        if not self.log_file.exists():
            return []
        lines = [line.split() for line in self.log_file.read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == kind]

    def record(self, number, repeat=0):
        folder = self.out / "trials" / f"{number:04d}" / f"repeat_{repeat}"
        return json.loads((folder / "trial.json").read_text())


@pytest.fixture(scope="session")
def make_tiny():
    """Return how to make a project folder with the program in it."""

    def make(parent):
        folder = parent / "project"
        folder.mkdir()
        shutil.copy(PROGRAM, folder / "tiny_trial.py")
        return Tiny(folder)

    return make


@pytest.fixture
def tiny(make_tiny, tmp_path):
    return make_tiny(tmp_path)
