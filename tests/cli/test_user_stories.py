"""The three stories of the README, run as they stand there, with two short trainings in all."""

import importlib.util
import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORIES = {"README.md": "## Three stories", "README.zh.md": "## 三个故事"}
# What the reader's own study has exported, and the config that it changes: as small as can be.
BEST = 'schema: 1\ncommand: [python, -m, mindtune.experiments.gpt, --config, "{config}"]\nbase_config: base.yaml\n'
BASE = """
model: {num_layers: 1, hidden_size: 32, num_heads: 2, seq_length: 32}
training: {global_batch_size: 8, micro_batch_size: 8, recompute: none, steps: 70, warmup: 5, eval_samples: 8}
"""


def commands(name):
    """Return the commands of the stories, without their comments."""
    section = (ROOT / name).read_text(encoding="utf-8").split(STORIES[name])[1].split("\n## ")[0]
    lines = "\n".join(section.split("```")[1::2]).splitlines()
    return [command for line in lines if (command := line.split("  #")[0].strip())]


def block(kind, begins):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in text.split(f"```{kind}\n")[1:]]
    return next(found for found in blocks if found.startswith(begins))


def test_both_languages_tell_the_same_stories():
    assert commands("README.md") == commands("README.zh.md")
    assert len(commands("README.md")) == 11


@pytest.mark.mindspore
def test_the_stories_run_as_they_are_told(tmp_path):
    (tmp_path / "train.py").write_text(block("python", "import numpy"), encoding="utf-8")
    (tmp_path / "faults.yaml").write_text(block("yaml", "faults:"), encoding="utf-8")
    (tmp_path / "best_config.yaml").write_text(BEST)
    (tmp_path / "base.yaml").write_text(BASE)
    scripts = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MINDTUNE_")}
    has_pdf = importlib.util.find_spec("typst") is not None
    said = {}
    for command in commands("README.md"):
        if command.endswith(".pdf") and not has_pdf:
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**environment, "PATH": scripts},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == (1 if " gate " in command else 0), (command, done.stderr[-2000:])
        said[command] = done.stdout
    watched, replayed = (said[c] for c in list(said)[1:3])
    assert re.search(r"step 100 of 100 \(100%\), loss .*\nended: ok", watched)
    assert "verdict: healthy" in replayed
    assert "default-src 'none'" in (tmp_path / "night.html").read_text(encoding="utf-8")
    assert "non_finite_grad" in said["mindtune replay drill"]
    if has_pdf:
        assert (tmp_path / "drill.pdf").read_bytes().startswith(b"%PDF-")
    assert 'failures="1"' in (tmp_path / "gate.xml").read_text()
    rows = json.loads(said["mindtune compare baseline.json drill --json"])
    assert {"step_time_s", "loss"} <= {row["metric"] for row in rows}
    assert "mindtune gate" in (tmp_path / "gate.yml").read_text()
