"""The wheel holds every module and data file of the tree."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("controller", "policies", "search", "experiments")
DATA = {
    ".py",
    ".yaml",
    ".json",
    ".jsonl",
    ".csv",
    ".html",
    ".typed",
    ".md",
    ".css",
    ".c",
    ".typ",
    ".otf",
}


@pytest.mark.timeout(300)
def test_wheel_holds_the_tree_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(source)],
        check=True, capture_output=True, timeout=280,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    held = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if not name.split("/")[0].endswith(".dist-info")
    }
    expected = {
        f"mindtune/{path.relative_to(source).as_posix()}"
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file() and path.suffix in DATA and "build" not in path.parts
    }
    assert held == expected
