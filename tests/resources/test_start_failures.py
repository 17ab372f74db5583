"""Start failures: temporary ones cost only time, and permanent ones are reported soon."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentfly.core.errors import (
    AcquireTimeout,
    APIRefused,
    APIUnavailable,
    ConfigError,
    PrerequisiteError,
    ResourceError,
    ResourceStartError,
    UsageError,
)
from agentfly.core.events import EventStream, ResourceStartBackoff
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.status import EngineSnapshot
from agentfly.resources.scheduler.backoff import (
    DISK_FULL_TIMEOUT_S,
    HOPELESS_AFTER_S,
    MAX_BACKOFF_S,
    MIN_FAILING_S,
    StartFailureCause,
    cause_of,
)
from agentfly.testing.fake_resource import FakeBackend, FakeSpec


def now() -> float:
    return asyncio.get_running_loop().time()


def refusing(error: Exception, until: float) -> Callable[[str, str], Coroutine[Any, Any, None]]:
    """Starts fail until a time."""

    async def behave(operation: str, instance: str) -> None:
        if operation == "start":
            if now() < until:
                raise error
            await asyncio.sleep(0.05)

    return behave


async def used_by_all(engine: ResourceEngine, spec: FakeSpec, count: int, seconds: float = 0.1) -> list[object]:
    """What many owners get who each use an instance for a while: its name, or an error."""

    async def use(owner: str) -> object:
        try:
            lease = await engine.acquire(spec, owner)
        except ResourceError as error:
            return error
        await asyncio.sleep(seconds)
        await engine.release(lease)
        return lease.instance

    return await asyncio.gather(*(use(f"rollout {number}") for number in range(count)))


def errors(outcomes: list[object]) -> list[object]:
    return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]


REFUSALS = [
    ConnectionRefusedError("the daemon restarts"),
    ResourceError("creating the container failed: too many requests (status 429)"),
    OSError(errno.EAGAIN, "Resource temporarily unavailable"),
    RuntimeError("the game server is not up"),
]


@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_backend_that_refuses_for_some_seconds_costs_no_request_and_few_starts(
    play: Callable[..., None], error: Exception, seconds: float
) -> None:
    async def scene(engine: ResourceEngine) -> None:
        world = FakeBackend(refusing(error, until=seconds))
        outcomes = await used_by_all(engine, FakeSpec(world=world, capacity=8), 600)
        assert errors(outcomes) == []
        assert world.count("start") <= 8 + 5 + 8, "eight at once, then one at a time at growing intervals"

    play(scene)


def test_a_backend_that_lets_few_start_a_second_is_asked_more_slowly_and_serves_all(
    play: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    recent: list[float] = []

    async def few(operation: str, instance: str) -> None:
        if operation == "start":
            recent[:] = [when for when in recent if when > now() - 1]
            if len(recent) >= 4:
                raise ResourceError("too many creates (status 429)")
            recent.append(now())
            await asyncio.sleep(0.2)

    async def scene(engine: ResourceEngine) -> None:
        world = FakeBackend(few)
        outcomes = await used_by_all(engine, FakeSpec(world=world, capacity=64), 64, seconds=60)
        assert errors(outcomes) == []
        assert world.count("start") < 3 * 64

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert len(caplog.records) == 1


def test_a_disk_that_is_full_makes_starts_wait_for_room_and_is_told_once(
    play: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(engine: ResourceEngine) -> None:
        world = FakeBackend()

        async def fill(operation: str, instance: str) -> None:
            if operation == "start" and len(world.alive) > 9:
                raise OSError(errno.ENOSPC, "No space left on device", "/var/lib/boxes")

        world.hook = fill
        spec = FakeSpec(world=world, capacity=256, reuse="recreate")
        outcomes = await used_by_all(engine, spec, 100, seconds=20)
        assert errors(outcomes) == []
        assert now() < 20 * (100 / 9 + 2), "as fast as there is room"
        assert world.count("start") - 100 < 150

    with caplog.at_level(logging.WARNING):
        play(scene)
    (told,) = [record.getMessage() for record in caplog.records if "disk is full" in record.getMessage()]
    assert "/var/lib/boxes" in told
    assert len(caplog.records) == 1


def test_a_disk_that_stays_full_is_told_to_those_who_wait_in_the_end(play: Callable[..., None]) -> None:
    full = ResourceStartError("mkdir: cannot create directory '/boxes/1': No space left on device")

    async def scene(engine: ResourceEngine) -> None:
        world = FakeBackend()
        spec = FakeSpec(world=world, capacity=2)
        held = await engine.acquire(spec, "who holds on to it")
        world.hook = refusing(full, until=float("inf"))
        began = now()
        with pytest.raises(ResourceStartError, match="No space left"):
            await engine.acquire(spec, "who waits")
        assert DISK_FULL_TIMEOUT_S <= now() - began <= DISK_FULL_TIMEOUT_S + MAX_BACKOFF_S
        await engine.release(held)

        async def nobody_has_anything() -> None:
            alone, began = FakeSpec(world=FakeBackend(refusing(full, until=float("inf")))), now()
            async with ResourceEngine(ledger=engine._directory) as other:
                with pytest.raises(ResourceStartError, match="No space left"):
                    await other.acquire(alone, "who waits")
            assert MIN_FAILING_S <= now() - began < 3 * MIN_FAILING_S

        await nobody_has_anything()

    play(scene)


def test_what_never_starts_is_told_after_some_seconds_and_to_all_when_nothing_suggests_that_it_passes(
    play: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(engine: ResourceEngine) -> None:
        world = FakeBackend(refusing(ResourceError("the daemon is gone"), until=float("inf")))
        ends: list[float] = []

        async def ask(owner: str) -> None:
            with pytest.raises(ResourceStartError, match=r"the daemon is gone.*tried \d+ times"):
                await engine.acquire(spec, owner)
            ends.append(now())

        spec = FakeSpec(world=world, capacity=8)
        await asyncio.gather(*(ask(f"rollout {number}") for number in range(64)))
        assert MIN_FAILING_S <= ends[0] < 2 * MIN_FAILING_S
        assert HOPELESS_AFTER_S <= ends[-1] < HOPELESS_AFTER_S + MAX_BACKOFF_S
        assert sum(end < HOPELESS_AFTER_S for end in ends) <= 4, "one for each try"
        assert world.count("start") < 20

    with caplog.at_level(logging.WARNING):
        play(scene)
    (told,) = [record.getMessage() for record in caplog.records if "does not start" in record.getMessage()]
    assert "the daemon is gone" in told


def test_a_pool_whose_starts_fail_holds_up_no_other(play: Callable[..., None]) -> None:
    async def scene(engine: ResourceEngine) -> None:
        broken = FakeSpec(world=FakeBackend(refusing(OSError("down"), until=3)), name="broken", cpus=1)
        waiting = [asyncio.create_task(engine.acquire(broken, f"r{number}")) for number in range(4)]
        await asyncio.sleep(0.1)
        began = now()
        await engine.acquire(FakeSpec(name="sound", cpus=1), "a")
        assert now() == began
        await asyncio.gather(*waiting)

    play(scene, max_concurrent_starts=1)


def test_who_holds_something_waits_through_a_pause_and_is_in_no_deadlock(play: Callable[..., None]) -> None:
    async def scene(engine: ResourceEngine) -> None:
        broken = FakeSpec(world=FakeBackend(refusing(OSError("down"), until=3)), name="broken", capacity=1)
        sound = FakeSpec(name="sound", capacity=1)
        await engine.acquire(sound, "a")
        await engine.acquire(broken, "a")
        assert now() > 3

    play(scene)


def test_a_wait_that_ends_while_starts_fail_says_with_what(play: Callable[..., None]) -> None:
    async def scene(engine: ResourceEngine) -> None:
        spec = FakeSpec(world=FakeBackend(refusing(OSError("down"), until=30)))
        with pytest.raises(AcquireTimeout, match=r"its starts have failed for 2\.0 s with OSError: down"):
            await engine.acquire(spec, "a", timeout=2)
        assert EngineSnapshot.from_json(json.dumps(engine.snapshot().to_json())).pools[0].failing == "OSError: down"

    play(scene)


def test_each_pause_is_an_event(play: Callable[..., None]) -> None:
    seen: list[ResourceStartBackoff] = []
    events = EventStream()

    async def scene(engine: ResourceEngine) -> None:
        await engine.acquire(FakeSpec(world=FakeBackend(refusing(OSError("down"), until=1))), "a")

    def keep(event: object) -> None:
        if isinstance(event, ResourceStartBackoff):
            seen.append(event)

    with events.subscribed(keep):
        play(scene, events=events)
    assert [(event.rounds, event.seconds) for event in seen] == [(1, 0.25), (2, 0.5), (3, 1.0)]


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        *((error, StartFailureCause.TRANSIENT) for error in REFUSALS),
        (TimeoutError("start() took longer"), StartFailureCause.TRANSIENT),
        (MemoryError(), StartFailureCause.TRANSIENT),
        (APIUnavailable("503", status=503), StartFailureCause.TRANSIENT),
        (
            caused(ResourceError("the way to the engine is broken"), FileNotFoundError("docker.sock")),
            StartFailureCause.TRANSIENT,
        ),
        (TypeError("Game() takes no arguments"), StartFailureCause.PERMANENT),
        (FileNotFoundError("levels.json"), StartFailureCause.PERMANENT),
        (ConfigError("no"), StartFailureCause.PERMANENT),
        (UsageError("no"), StartFailureCause.PERMANENT),
        (PrerequisiteError("no docker"), StartFailureCause.PERMANENT),
        (APIRefused("401", status=401), StartFailureCause.PERMANENT),
        (caused(ResourceStartError("could not be prepared"), KeyError("x")), StartFailureCause.PERMANENT),
        (OSError(errno.ENOSPC, "full"), StartFailureCause.DISK_FULL),
        (OSError(errno.EDQUOT, "full"), StartFailureCause.DISK_FULL),
        (caused(PrerequisiteError("could not make a box"), OSError(errno.ENOSPC, "full")), StartFailureCause.DISK_FULL),
        (ResourceError("write /var/lib/docker/x: no space left on device (status 500)"), StartFailureCause.DISK_FULL),
    ],
    ids=repr,
)
def test_what_may_pass_is_told_from_what_lasts_and_from_a_full_disk(
    error: BaseException, cause: StartFailureCause
) -> None:
    assert cause_of(error) is cause
