"""The cause of a failure is the last full exception, and nothing else in a log."""

import pytest

from mindtune.controller.trials.failure_text import (
    is_out_of_memory,
    last_exception,
    read_tail,
    shorten,
)

FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\n'
ABORT = (
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
)
NATIVE = """
----------------------------------------------------
- C++ Call Stack: (For framework developers)
----------------------------------------------------
mindspore/ccsrc/cluster/init.cc:37 Initialize
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("all went well\nRuntimeError: error\n", None),
        (FRAMES + "ValueError: bad\n", "ValueError: bad"),
        (FRAMES + "KeyboardInterrupt\n", "KeyboardInterrupt"),
        (FRAMES + "a.b.MyError: first\nsecond\n  third\n", "a.b.MyError: first\nsecond\n  third"),
        # The frame shows `raise ValueError(` over two lines; the message is not "(".
        (
            FRAMES.replace("f()", "raise ValueError(\n    ^^^^^^") + "ValueError: two\nlines\n",
            "ValueError: two\nlines",
        ),
        (
            FRAMES + "KeyError: 1\n\nDuring handling of the above exception, another exception "
            "occurred:\n\n" + FRAMES + "TypeError: 2\n",
            "TypeError: 2",
        ),
        (
            FRAMES + "RuntimeError: Allocate memory failed\n" + NATIVE
            + "\n[WARNING] DISTRIBUTED(4370,7f9e,python):2026 [a.cc:1] F] Retry\n",
            "RuntimeError: Allocate memory failed",
        ),
        (
            FRAMES + "ValueError: bad\n[INFO] PRE_ACT(1,2,python):2026 [a.cc:1] f] peak used\n",
            "ValueError: bad",
        ),
        # A traceback that was cut off: the one before it counts.
        (FRAMES + "ValueError: whole\n" + FRAMES, "ValueError: whole"),
        ('  File "a.py", line 1\n    x = = 1\nSyntaxError: invalid syntax\n',
         "SyntaxError: invalid syntax"),
        ("noise\n" + ABORT + "\n", ABORT),
    ],
)  # fmt: skip
def test_the_last_exception_of_a_log(text, expected):
    assert last_exception(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "MemoryError",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8.00 EiB",
        "RuntimeError: Allocate memory failed",
        "RuntimeError: Device(id:0) memory isn't enough and alloc failed, kernel name: Default/Add",
        "RuntimeError: Memory not enough: alloc size[0] is smaller than required size[8].",
        "RuntimeError: Memory pool not enough, graph: 1",
        "RuntimeError: Alloc device mem failed, alloc size : 8",
        "RuntimeError: Malloc for kernel output failed, Memory isn't enough, node: x",
        "RuntimeError: Allocate continuous memory failed, device ptr list size: 3",
        "RuntimeError: Allocate dynamic workspace memory failed",
        "OSError: [Errno 12] Cannot allocate memory",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_words_for_memory_that_ran_out(text):
    assert is_out_of_memory(text)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: memory_utilization must be at most 1",
        "RuntimeError: The size of input dim is not enough",
        "RuntimeError: Launch kernel failed, name:Default/AllReduce-op0",
        "OSError: No space left on device",
        "RuntimeError: Device memory is fine, allocation failed for another reason",
    ],
)
def test_other_failures_are_not_out_of_memory(text):
    assert not is_out_of_memory(text)


def test_reading_a_log_is_bounded(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 1_000_000 + b"\xff end")
    assert read_tail(path, limit=5) == "\ufffd end"
    assert len(read_tail(path)) == 256 * 1024
    assert read_tail(tmp_path / "none.log") == ""


def test_a_long_message_is_cut_to_2000_characters():
    assert shorten("E: " + "x" * 5000) == "E: " + "x" * 1994 + "..."
