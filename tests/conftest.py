"""Order of the tests: fast ones first, then those that start MindSpore, then several ranks."""

import pytest


def cost(item):
    """Return 0 for plain tests, 1 for one MindSpore process, 2 for several ranks."""
    if item.get_closest_marker("msrun"):
        return 2
    return 1 if item.get_closest_marker("mindspore") else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=cost)
