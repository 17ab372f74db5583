"""Preparation: what instances need before they start is prepared once, and ahead of time on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from agentfly.core.errors import EngineClosed, PrerequisiteError, ResourceStartError
from agentfly.core.events import EventStream
from agentfly.resources.engine import controller, preparation
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.testing.fake_resource import FakeBackend, FakeSpec, no_faults
from tests.support.virtual_time import run_in_virtual_time


@pytest.fixture
def play(tmp_path):
    """Run ``scene(engine)`` in virtual time."""

    def run(scene, **settings):
        async def main():
            async with ResourceEngine(ledger=tmp_path, **settings) as engine:
                await scene(engine)
            assert not list(tmp_path.iterdir())

        run_in_virtual_time(main())

    return run


def taking(seconds, image=None):
    async def behave(operation, instance):
        if operation == "prepare" and image in (None, instance):
            await asyncio.sleep(seconds)

    return behave


def failing(error):
    async def behave(operation, instance):
        if operation == "prepare":
            raise error

    return behave


def now():
    return asyncio.get_running_loop().time()


def test_an_image_is_prepared_once_for_all_starts_and_specs_that_need_it(play):
    async def scene(engine):
        world = FakeBackend(taking(5))
        specs = [FakeSpec(world=world, image="debian", capacity=4, name=name) for name in ("one", "two")]
        await asyncio.gather(*(engine.acquire(spec, f"r{n}") for n in range(4) for spec in specs))
        assert world.count("prepare") == 1
        assert world.count("start") == 8
        assert now() == pytest.approx(5)
        await engine.acquire(FakeSpec(world=world, image="fedora"), "r")
        assert world.count("prepare") == 2

    play(scene)


def test_the_time_of_a_preparation_does_not_count_as_that_of_a_start(play):
    async def scene(engine):
        world = FakeBackend(taking(600))
        await engine.acquire(FakeSpec(world=world, image="debian", start_timeout_s=1), "r")
        slow = FakeSpec(world=world, image="fedora", start_timeout_s=1, prepare_timeout_s=30)
        with pytest.raises(ResourceStartError, match=r"fedora, which fake needs, could not be prepared.* 30 s"):
            await engine.acquire(slow, "r")

    play(scene)


@pytest.mark.parametrize("error", [ValueError("no such image"), PrerequisiteError("log in first")])
def test_a_preparation_that_fails_fails_all_starts_that_wait_for_it_and_the_next_tries_anew(play, error):
    async def scene(engine):
        world = FakeBackend(failing(error))
        spec = FakeSpec(world=world, image="debian")
        outcomes = await asyncio.gather(*(engine.acquire(spec, f"r{n}") for n in range(3)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ResourceStartError}
        assert all(str(error) in str(outcome) for outcome in outcomes)
        assert world.count("prepare") == 1
        assert world.count("start") == 0
        world.hook = no_faults
        await engine.acquire(spec, "later")
        assert world.count("prepare") == 2

    play(scene)


def test_a_start_that_fails_has_its_image_looked_after_again(play):
    async def scene(engine):
        async def fail_to_start(operation, instance):
            if operation == "start":
                raise ValueError("the image is gone")

        world = FakeBackend(fail_to_start)
        spec = FakeSpec(world=world, image="debian")
        with pytest.raises(ResourceStartError, match="the image is gone"):
            await engine.acquire(spec, "r")
        world.hook = no_faults
        await engine.acquire(spec, "r")
        assert world.count("prepare") == 2

    play(scene)


def test_one_who_gives_up_leaves_the_preparation_to_the_others(play):
    async def scene(engine):
        world = FakeBackend(taking(5))
        spec = FakeSpec(world=world, image="debian")
        given_up = asyncio.create_task(engine.acquire(spec, "a"))
        patient = asyncio.create_task(engine.acquire(FakeSpec(world=world, image="debian", name="other"), "b"))
        await asyncio.sleep(1)
        given_up.cancel()
        await patient
        assert world.count("prepare") == 1

    play(scene)


def test_closing_breaks_a_preparation_off_though_it_hangs(play):
    async def hang(operation, instance):
        if operation == "prepare":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()  # ends when the loop does

    async def scene(engine):
        spec = FakeSpec(world=FakeBackend(hang), image="debian")
        engine.prefetch([FakeSpec(world=spec.world, image=f"image-{n}") for n in range(5)])
        waiting = asyncio.create_task(engine.acquire(spec, "r"))
        await asyncio.sleep(1)
        began = now()
        logging.disable(logging.CRITICAL)
        await engine.close()
        logging.disable(logging.NOTSET)
        assert now() - began < 30
        with pytest.raises(EngineClosed):
            await waiting
        assert not spec.world.alive

    play(scene)


def test_what_is_prefetched_is_there_when_it_is_needed_and_few_are_fetched_at_once(play):
    async def scene(engine):
        at_once = most = 0

        async def prepare(operation, image):
            nonlocal at_once, most
            if operation == "prepare":
                at_once += 1
                most = max(most, at_once)
                await asyncio.sleep(5)
                at_once -= 1

        world = FakeBackend(prepare)
        specs = [FakeSpec(world=world, image=f"image-{n}") for n in range(6)]
        engine.prefetch(specs)
        engine.prefetch(specs)
        await asyncio.sleep(20)
        assert (world.count("prepare"), most, world.count("start")) == (6, 2, 0)
        began = now()
        await asyncio.gather(*(engine.acquire(spec, "r") for spec in specs))
        assert (now(), world.count("prepare")) == (began, 6)

    play(scene)


def test_a_prefetch_that_fails_is_logged_and_left_to_whoever_acquires(play, caplog):
    async def scene(engine):
        world = FakeBackend(failing(OSError("the registry is down")))
        spec = FakeSpec(world=world, image="debian")
        engine.prefetch([spec])
        await asyncio.sleep(1)
        world.hook = no_faults
        await engine.acquire(spec, "r")

    play(scene)
    assert "the registry is down" in caplog.text


def test_what_a_spec_keeps_ready_starts_with_its_prefetch(play):
    async def scene(engine):
        world = FakeBackend(taking(5))
        engine.prefetch([FakeSpec(world=world, image="debian", warm=3), FakeSpec(world=world, name="cold")])
        await asyncio.sleep(4)
        assert world.count("start") == 0
        await asyncio.sleep(2)
        assert world.count("start") == 3

    play(scene)


def test_preparations_can_be_followed_in_the_events(play):
    seen: list[Any] = []
    events = EventStream()

    async def scene(engine):
        world = FakeBackend(taking(5))
        await engine.acquire(FakeSpec(world=world, image="debian"), "r")
        world.hook = failing(ValueError("down"))
        with pytest.raises(ResourceStartError):
            await engine.acquire(FakeSpec(world=world, image="fedora"), "r")

    with events.subscribed(seen.append):
        play(scene, events=events)
    told = [event.to_json() for event in seen if "Prepar" in type(event).__name__]
    assert [(event["event"], event["what"]) for event in told] == [
        ("ResourcePreparing", "debian"),
        ("ResourcePrepared", "debian"),
        ("ResourcePreparing", "fedora"),
        ("ResourcePrepared", "fedora"),
    ]
    assert told[1]["seconds"] == pytest.approx(5)
    assert told[1]["error"] is None
    assert "down" in told[3]["error"]


def test_what_is_remembered_of_specs_is_bounded_however_many_there_are(play, monkeypatch):
    monkeypatch.setattr(controller, "REMEMBERED", 3)
    monkeypatch.setattr(preparation, "REMEMBERED", 3)

    async def scene(engine):
        world = FakeBackend()
        for number in range(10):
            spec = FakeSpec(world=world, image=f"image {number}", name=f"box {number}", capacity=1)
            lease = await engine.acquire(spec, f"r{number}")
            world.kill(lease.instance)
            await engine.check(lease)
            await engine.release(lease)
        assert world.count("prepare") == 10
        assert len(engine._controller._warned) == 3
        assert len(engine._preparer._done) == 3
        await engine.acquire(FakeSpec(world=world, image="image 0", name="again"), "r")
        assert world.count("prepare") == 11

    play(scene)
