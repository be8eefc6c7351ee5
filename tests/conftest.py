"""Order of the tests: fast ones first, then those that start MindSpore, then several ranks."""

import signal

import pytest


def pytest_configure():
    """Let tests of Ctrl-C and of a terminal's end hold in a shell's background and under nohup.

    There SIGINT or SIGHUP is ignored, and every program started from here would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def cost(item):
    """Return 0 for plain tests, 1 for one MindSpore process, 2 for several ranks."""
    if item.get_closest_marker("msrun"):
        return 2
    return 1 if item.get_closest_marker("mindspore") else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=cost)
