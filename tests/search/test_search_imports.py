"""What `mindtune space` needs starts fast: neither Optuna nor SciPy nor NumPy is imported."""

import subprocess
import sys

import pytest

HEAVY = "('numpy', 'optuna', 'scipy', 'pandas', 'mindspore', 'sqlalchemy')"


@pytest.mark.parametrize(
    "module",
    ["constraints", "space", "scoring", "confirming", "convergence", "student", "attributes"],
)
def test_light_modules_import_nothing_heavy(module):
    code = (
        f"import sys, mindtune.search.{module}\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
