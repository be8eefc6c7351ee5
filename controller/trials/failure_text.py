"""Read the cause of a failure out of log text and exceptions.

Only the text of an exception counts. A log line that says "error" proves nothing: frameworks
print such lines in runs that end well.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["is_out_of_memory", "last_exception", "read_tail", "shorten"]

_TAIL_BYTES = 256 * 1024
_MESSAGE_CHARS = 2000

_HEADER = re.compile(r"^Traceback \(most recent call last\):\s*$")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?:?$")
_SYNTAX_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError): .*$")
_LOG_LINE = re.compile(r"^\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\] ")
"""A line of MindSpore's log."""
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_NATIVE_PART = re.compile(r"\n-{10,}\n- .*", re.DOTALL)
"""MindSpore appends its C++ call stack under a ruled heading."""
_ABORT = re.compile(r"^terminate called .*(?:\n\s+what\(\): .*)?", re.MULTILINE)
"""What the C++ runtime prints when nobody catches an exception."""

_OUT_OF_MEMORY = re.compile(
    r"""
    MemoryError\b | \bbad_alloc\b | \bOutOfMemory | \bout\ of\ memory\b
    | cannot\ allocate\ memory
    # MindSpore 2.10: "Memory not enough", "memory isn't enough and alloc failed", "Allocate memory
    # failed", "Malloc for kernel output failed", "Alloc device mem failed" and their like.
    | \bmemory\ (?:pool\ )?(?:is\ )?(?:not|n't)\ enough\b | \bmemory\ isn't\ enough\b
    | \b(?:m?alloc(?:ate)?)\ (?:\w+\ ){0,3}mem(?:ory)?\ failed\b
    | \bmemory\ malloc\ failed\b | \bmalloc\ for\ kernel\ \w+\ failed\b
    """,
    re.IGNORECASE | re.VERBOSE,
)


def is_out_of_memory(exception_text: str) -> bool:
    """Tell whether the text of an exception says that memory ran out."""
    return _OUT_OF_MEMORY.search(exception_text) is not None


def shorten(message: str) -> str:
    """Return a message without MindSpore's C++ part, at most 2000 characters long."""
    text = _NATIVE_PART.sub("", message.rstrip()).rstrip()
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 3] + "..."


def read_tail(path: Path, *, limit: int = _TAIL_BYTES) -> str:
    """Return the last `limit` bytes of a log as text; "" when there is no such file."""
    if not path.is_file():  # a pipe of that name would be waited for without end
        return ""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - limit))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def last_exception(text: str) -> str | None:
    """Return the last exception of the last traceback in `text`, with all lines of its message.

    None when there is no exception; the caller must not guess from other lines.
    """
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    for start in reversed(starts):
        found = _exception_after(lines, start + 1)
        if found is not None:
            return found
    # A syntax error in the program itself has no traceback header.
    for number in range(len(lines) - 1, 0, -1):
        if _SYNTAX_ERROR.match(lines[number]) and lines[number - 1].startswith(" "):
            return shorten(lines[number])
    aborts: list[str] = _ABORT.findall(text)
    return shorten(aborts[-1]) if aborts else None


def _exception_after(lines: list[str], start: int) -> str | None:
    """Return the exception that ends the traceback whose frames begin at line `start`."""
    number = start
    # Frames are indented; the exception is the first line that is not.
    while number < len(lines) and (not lines[number].strip() or lines[number].startswith(" ")):
        number += 1
    if number == len(lines) or not _EXCEPTION.match(lines[number]):
        return None
    message = [lines[number]]
    for line in lines[number + 1 :]:
        if _HEADER.match(line) or line.startswith(_CHAINED) or _LOG_LINE.match(line):
            break
        message.append(line)
    return shorten("\n".join(message))
