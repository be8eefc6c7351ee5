"""Run small Python programs as trials."""

import sys
import textwrap

import pytest

from mindtune.controller.trials.launcher import launch
from mindtune.controller.trials.outcome import record_outcome


class Program:
    """A Python program in a folder whose path holds a space."""

    def __init__(self, folder):
        self.trial_dir = folder / "a trial"
        self.trial_dir.mkdir()
        self.script = folder / "a program.py"

    def launch(self, source, **options):
        self.script.write_text(textwrap.dedent(source))
        options = {"startup_deadline_s": 20.0, "deadline_s": 20.0, **options}
        return launch([sys.executable, str(self.script)], trial_dir=self.trial_dir, **options)

    def run(self, source, *, knobs=None, **options):
        report = self.launch(source, **options)
        return record_outcome(report, knobs=knobs or {})


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)
