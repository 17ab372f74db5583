"""What holds for all tests: which of them may be run a second time."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave ``--reruns`` to slow tests.

    Those drive engines, servers and processes of the machine, where one may lose a race that is no fault of ours, among
    thousands that did not. `make test` runs such a one again and says so (RERUN). Whatever is fast has no such excuse.
    """
    if not config.getoption("reruns", None):
        return
    for item in items:
        if item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.flaky(reruns=0))
