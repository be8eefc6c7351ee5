"""The READMEs' tables of faults name the cases of the experiment, all of them and no others."""

from pathlib import Path

import pytest

from mindtune.experiments.fault_injection.cases import CASES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "heading"),
    [("README.md", "## What others do"), ("README.zh.md", "## 其他系统怎么做")],
)
def test_every_fault_can_be_reproduced_by_its_name(name, heading):
    section = (ROOT / name).read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert all(len(row) == 10 for row in rows)
    named = [part for row in rows for part in row[2].split("`")[1::2]]
    faulty = [case for case in CASES if not case.startswith("healthy")]
    assert sorted(named) == sorted(faulty)
