"""The code that a study's command runs, as far as it is the user's own.

Of a script: itself and what it imports from its own folder, and so on from there. Of a module
(`-m`): its file, or its whole package. Of MindFormers: the modules that it is to register.
Installed packages are known by their versions, and none of the code is executed here.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from mindtune.controller.trials.commands import names_file

__all__ = ["program_code"]

_ENDINGS = (".py", ".sh")
_PACKAGE = "__init__.py"


def program_code(
    command: Sequence[str], folder: Path, *, registered: Path | None = None
) -> dict[str, str]:
    """Return name -> hash of the files that a command runs.

    Args:
        command: program and arguments as the user wrote them.
        folder: folder of the file that holds the command.
        registered: folder of modules that the program loads by their names; None: there is none.
    """
    files: dict[str, Path] = {}
    for word in command:
        if word.endswith(_ENDINGS) and names_file(word, folder):
            script = folder / word
            files[word if script.name in files else script.name] = script
            root = script.resolve().parent
            for path in _imported(script.resolve(), root):
                files.setdefault(str(path.relative_to(root)), path)
    if "-m" in command[:-1]:
        files |= _module_files(command[command.index("-m") + 1])
    if registered is not None:
        files |= {f"registered/{path.name}": path for path in registered.glob("*.py")}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if path.is_file()
    }


def _imported(script: Path, root: Path) -> list[Path]:
    """Return the files below `root`, a script's folder, that it imports, directly or not."""
    found: dict[Path, None] = {}
    left = [script]
    while left:
        for path in _files_of(left.pop(), root):
            if path != script and path not in found:
                found[path] = None
                left.append(path)
    return sorted(found)


def _files_of(source: Path, root: Path) -> Iterator[Path]:
    """Yield the files below `root` that one file's import statements name."""
    if source.suffix != ".py":
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's code; its own run gives them
            tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # it cannot be run either, or is of another version of Python
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_below(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield from _files_below(root, [*node.module.split("."), alias.name])


def _files_below(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the file of a dotted name, or all files of the package that it lies in."""
    folder = root
    for part in parts:
        if (folder / part / _PACKAGE).is_file():
            yield from sorted((folder / part).rglob("*.py"))
            return
        if (folder / f"{part}.py").is_file():
            yield folder / f"{part}.py"
            return
        folder /= part


def _module_files(name: str) -> dict[str, Path]:
    """Return the files of a module, or of a package with all that lie below it."""
    spec = _find_spec(name)
    if spec is None or spec.origin is None:
        return {}
    origin = Path(spec.origin)
    if not spec.submodule_search_locations:
        return {origin.name: origin}
    root = origin.parent
    return {str(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module as `importlib.util.find_spec` does, but import none of its parents.

    They are the user's code: it may load a framework, or fail.
    """
    spec: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        found = (finder.find_spec(full, path) for finder in sys.meta_path)
        spec = next((entry for entry in found if entry is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations or ()
    return spec
