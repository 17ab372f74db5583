"""Garbage collection: tuned while rollouts run, and restored afterwards, also with nested users."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

import agentfly as af
from agentfly.agents.agent import Agent
from agentfly.core import gc_tuning
from agentfly.core.gc_tuning import GEN0_THRESHOLD, INTERPRETER_FREEZES, tuned_gc
from agentfly.policies.scripted import ScriptedPolicy

Settings = tuple[int, tuple[int, int, int]]


def settings() -> Settings:
    return frozen_by_program(), gc.get_threshold()


def frozen_by_program() -> int:
    """How many objects are frozen, except for those that some versions of Python freeze when they start."""
    count = gc.get_freeze_count()
    return count if count > INTERPRETER_FREEZES else 0


@pytest.fixture(autouse=True)
def as_python_has_it() -> Iterator[None]:
    before = settings()
    assert before[0] == 0
    yield
    assert settings() == before


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_exists_is_frozen_and_collections_are_rarer_within_the_block_only() -> None:
    with tuned_gc():
        frozen, threshold = settings()
        assert frozen > 1000
        assert threshold[0] == GEN0_THRESHOLD


def test_what_comes_into_being_within_the_block_is_collected() -> None:
    with tuned_gc():
        knot = weakref.ref(Knot())
        gc.collect()
        assert knot() is None


def test_garbage_from_before_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "COLLECT_EVERY_S", -1.0)
    knot = weakref.ref(Knot())
    with tuned_gc():
        assert knot() is None
    monkeypatch.setattr(gc_tuning, "COLLECT_EVERY_S", 1e9)
    knot = weakref.ref(Knot())
    with tuned_gc():
        pass
    gc.collect()
    assert knot() is None


def test_blocks_may_be_nested_and_overlap_and_the_last_end_undoes_it() -> None:
    first, second = tuned_gc(), tuned_gc()
    first.__enter__()
    frozen = frozen_by_program()
    second.__enter__()
    assert 0 < frozen_by_program() <= frozen, "other threads may free some of what was frozen"
    first.__exit__(None, None, None)
    assert 0 < frozen_by_program() <= frozen
    second.__exit__(None, None, None)
    assert frozen_by_program() == 0


def test_it_is_undone_where_the_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), tuned_gc():
        _ = 1 / 0


def test_threads_may_ask_for_it_at_the_same_time() -> None:
    def often() -> None:
        for _ in range(5):
            with tuned_gc():
                assert gc.get_threshold()[0] == GEN0_THRESHOLD

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_the_program_has_set_by_itself_stays() -> None:
    threshold = gc.get_threshold()
    try:
        gc.freeze()
        gc.set_threshold(123_456, 7, 8)
        frozen = frozen_by_program()
        with tuned_gc():
            assert gc.get_threshold() == (123_456, 7, 8)
            assert 0 < frozen_by_program() <= frozen
        assert gc.get_threshold() == (123_456, 7, 8)
        assert 0 < frozen_by_program() <= frozen
        gc.set_threshold(0)
        with tuned_gc():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


async def test_rollouts_run_so_and_nothing_of_it_is_left_behind() -> None:
    seen = []

    def script(prompt: str, turn: int) -> str:
        seen.append(settings())
        return "Done."

    await af.run(Agent(model="scripted"), ["a", "b"], policy=ScriptedPolicy(script))
    assert all(frozen > 1000 and threshold[0] == GEN0_THRESHOLD for frozen, threshold in seen)
    assert len(seen) == 2
