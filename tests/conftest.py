"""Fixtures and rules of all tests: which may be rerun, and no failure because the machine is busy."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes, or the drawing of one, says how busy the machine is.
settings.register_profile("agentfly", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentfly")


@pytest.fixture(autouse=True)
def registries_as_they_were() -> Iterator[None]:
    """Take out again what a test makes known by name: others go through all algorithms and losses that there are."""
    modules = [sys.modules.get(f"agentfly.training.{name}") for name in ("advantages", "losses", "trackers")]
    known = [vars(module)[name]._known for module, name in zip(modules, _REGISTRIES, strict=True) if module]
    before = [dict(one) for one in known]
    yield
    for one, kept in zip(known, before, strict=True):
        one.clear()
        one.update(kept)


_REGISTRIES = ("ALGORITHMS", "LOSSES", "TRACKERS")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make long tests slow ones too, and leave ``--reruns`` to slow tests.

    Those drive engines, servers and processes of the machine, where one may lose a race that is no fault of ours, among
    thousands that did not. `make test` runs such a one again and says so (RERUN). Whatever is fast has no such excuse.
    """
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    if not config.getoption("reruns", None):
        return
    for item in items:
        if item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.flaky(reruns=0))
