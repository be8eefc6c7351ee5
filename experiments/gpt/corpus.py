"""The text: the standard library's own `.py` files of the running interpreter, split by file.

Nothing is downloaded and no file is copied. The split depends on a file's path alone, so it is the
same on every machine with the same Python version.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Corpus", "Split", "list_files", "split_of"]

Split = Literal["train", "validation"]
Bytes = npt.NDArray[np.uint8]

# Not the library itself: installed packages, its tests, generated tables, programs that some
# distributions leave out.
_SKIPPED_FOLDERS = frozenset(
    {
        *(
            "site-packages",
            "dist-packages",
            "__pycache__",
            "test",
            "tests",
            "idle_test",
            "idlelib",
            "lib2to3",
        ),
        *("pydoc_data", "encodings", "ensurepip", "turtledemo", "distutils", "__phello__"),
    }
)
_MAX_FILE_BYTES = 256 * 1024
# One file in 16 is held out.
_VALIDATION_SHARE = 16
# A NUL ends each file: it occurs in no Python source, so the model can learn that a new text
# begins.
_SEPARATOR = b"\0"


def split_of(name: str) -> Split:
    """Return the split of a file by its path relative to the library (forward slashes)."""
    digest = hashlib.sha256(name.encode()).digest()
    return "validation" if digest[0] % _VALIDATION_SHARE == 0 else "train"


def list_files(split: Split, root: Path | None = None) -> list[Path]:
    """Return the files of a split in a fixed order (by relative path).

    Args:
        split: Which part.
        root: Folder of the library; None: that of the running interpreter.

    Raises:
        FileNotFoundError: The folder holds no source of that split (a library inside a zip file,
            for example).
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    chosen: list[tuple[str, Path]] = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = set(relative.parts[:-1])
        if folders & _SKIPPED_FOLDERS or any(part.startswith("config-") for part in folders):
            continue
        name = relative.as_posix()
        if split_of(name) == split and 0 < path.stat().st_size <= _MAX_FILE_BYTES:
            chosen.append((name, path))
    if not chosen:
        raise FileNotFoundError(
            f"The standard library's sources ({split} part) must be readable as files, but none "
            f"was found in {root}; use a Python whose library is not packed."
        )
    return [path for _, path in sorted(chosen)]


@dataclass(frozen=True)
class Corpus:
    """One split as one long byte string, held in memory or read from its files."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]
    """Position of each file's first byte; one more entry than files, the last being the total
    length."""
    text: Bytes | None
    """The whole string, or None when it is read from the files."""

    @classmethod
    def load(cls, split: Split, *, cache: bool, root: Path | None = None) -> Corpus:
        """Index a split, and hold it in memory with `cache`."""
        files = tuple(list_files(split, root))
        if cache:
            contents = [path.read_bytes() + _SEPARATOR for path in files]
            lengths = [len(content) for content in contents]
            text = np.frombuffer(b"".join(contents), dtype=np.uint8)
        else:
            lengths = [path.stat().st_size + len(_SEPARATOR) for path in files]
            text = None
        return cls(files, (0, *itertools.accumulate(lengths)), text)

    def __len__(self) -> int:
        return self.starts[-1]

    def window(self, start: int, length: int) -> Bytes:
        """Return `length` bytes from a position, across file borders."""
        if not 0 <= start <= len(self) - length:
            raise IndexError(
                f"A window must lie inside 0..{len(self)}, but got {start} + {length}."
            )
        if self.text is not None:
            return self.text[start : start + length]
        pieces: list[bytes] = []
        index = bisect.bisect_right(self.starts, start) - 1
        position = start
        while position < start + length:
            content = self.files[index].read_bytes() + _SEPARATOR
            first = position - self.starts[index]
            piece = content[first : first + start + length - position]
            pieces.append(piece)
            position += len(piece)
            index += 1
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)
