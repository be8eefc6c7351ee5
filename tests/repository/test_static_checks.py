"""Lint, types, import directions and other rules over the whole tree."""

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("controller", "policies", "search", "experiments")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SCRIPTS = Path(sysconfig.get_path("scripts"))


@pytest.fixture(scope="module")
def link_tree():
    """Give the checkers real paths `mindtune/<package>`: they do not run import hooks."""
    folder = ROOT / "build" / "namespace" / "mindtune"
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        link = folder / package
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", "..", package))
    return folder.parent


def run(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def test_ruff_finds_nothing():
    run(str(SCRIPTS / "ruff"), "check", "--output-format", "concise", "--no-cache", ".")


def test_every_file_is_formatted():
    run(str(SCRIPTS / "ruff"), "format", "--check", "--no-cache", ".")


@pytest.mark.timeout(300)
def test_types_hold(link_tree):
    run(str(SCRIPTS / "mypy"), "--no-error-summary")


def test_import_directions_hold():
    run(str(SCRIPTS / "lint-imports"), "--no-cache")


def test_modules_stay_small_and_name_what_they_export():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, f"{path} is over 400 lines: two things in one?"
        names = {
            target.id
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        bare = path.name in ("__init__.py", "__main__.py")
        assert bare or "__all__" in names, f"{path} has no __all__"
    lengths = sorted(len(path.read_text().splitlines()) for path in MODULES)
    assert lengths[len(lengths) // 2] <= 200


def test_the_tree_speaks_of_the_project_alone():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    words = ["/" + "work/", "/" + "root/", "/opt" + "/mt", "/tmp/" + "bash_jobs"]
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".png", ".gz") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not [word for word in words if word in text], name


HEAVY = ("mindspore", "pandas", "scipy")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["space", "--help"], ["gate", "--help"], ["doctor", "--json"],
     ["export", "--help"], ["replay", "--help"], ["compare", "--help"]],
)  # fmt: skip
def test_light_commands_import_no_heavy_package(arguments):
    script = (
        "import sys\n"
        f"sys.argv = ['mindtune', *{arguments!r}]\n"
        "from mindtune.controller.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code in (0, None), end.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
