"""Order of the tests: fast ones first, then those that start MindSpore, then several ranks."""

import signal

import pytest


def pytest_configure():
    """Let tests of Ctrl-C hold where a shell has started the tests in its background.

    There SIGINT is ignored, and every program started from here would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def cost(item):
    """Return 0 for plain tests, 1 for one MindSpore process, 2 for several ranks."""
    if item.get_closest_marker("msrun"):
        return 2
    return 1 if item.get_closest_marker("mindspore") else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=cost)
