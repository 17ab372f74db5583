"""The engine with misbehaving fake resources, in virtual time."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from agentfly.core.errors import (
    AcquireTimeout,
    ConfigError,
    DeadlockBroken,
    EngineClosed,
    LeaseExpired,
    ResourceDied,
    ResourceError,
    ResourceStartError,
    UsageError,
)
from agentfly.core.events import EventStream
from agentfly.resources.engine import instances
from agentfly.resources.engine.engine import Budget, ResourceEngine
from agentfly.resources.kind import ResourceKind
from agentfly.resources.process.ledger import Ledger
from agentfly.resources.resource import Resource, Scope, Status
from agentfly.resources.spec import ResourceSpec
from agentfly.testing.fake_resource import FakeBackend, FakeResource, FakeSpec, no_faults
from tests.support.virtual_time import run_in_virtual_time


@pytest.fixture
def play(tmp_path):
    """Run ``scene(engine)`` in virtual time; afterwards nothing is alive in the world."""

    def run(scene, **settings):
        async def main():
            async with ResourceEngine(ledger=tmp_path, **settings) as engine:
                result = await scene(engine)
            assert not list(tmp_path.iterdir()), "the ledger lists something that was released"
            return result

        return run_in_virtual_time(main())

    return run


def misbehave(operation, act, times=1):
    """A behaviour: ``act`` the first few times that an operation is called."""
    left = times

    async def behave(called, instance):
        nonlocal left
        if called == operation and left > 0:
            left -= 1
            await act()

    return behave


def raising(error):
    async def act():
        raise error

    return act


async def hang():
    await asyncio.Event().wait()


async def hang_though_cancelled():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()  # ends when the loop does


def run_now(coroutine):
    """Run what never waits, at once."""
    with pytest.raises(StopIteration), closing(coroutine):
        coroutine.send(None)


def states(engine):
    return sorted(instance.state for pool in engine.snapshot().pools for instance in pool.instances)


def test_the_next_owner_sees_nothing_of_what_the_last_one_left(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1)
        first = await engine.acquire(spec, "a")
        first.resource.contents.append("secret")
        await engine.release(first)
        second = await engine.acquire(spec, "b")
        assert second.instance == first.instance
        assert second.resource.contents == []

    play(scene)


def test_what_an_owner_kept_of_a_resource_reaches_nothing_of_the_next_one(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1)
        first = await engine.acquire(spec, "a")
        kept, status, behave = first.resource, first.resource.status, first.resource.status()
        await engine.release_owner("a")
        second = await engine.acquire(spec, "b")
        assert second.instance == first.instance
        for use in (
            lambda: kept.contents,
            lambda: setattr(kept, "contents", ["stale"]),
            lambda: delattr(kept, "contents"),
            lambda: run_now(status()),
            lambda: run_now(behave),
        ):
            with pytest.raises(LeaseExpired, match="by a is over"):
                use()
        assert second.resource.contents == []
        assert await second.resource.status() is Status.HEALTHY
        assert "whose lease by a is over" in repr(kept)

    play(scene)


def test_the_leases_of_a_shared_resource_end_one_by_one(play):
    async def scene(engine):
        spec = FakeSpec()
        first, second = [await engine.acquire(spec, owner, scope=Scope.GLOBAL) for owner in "ab"]
        assert first.instance == second.instance
        await engine.release(first)
        with pytest.raises(LeaseExpired):
            assert first.resource.contents
        assert second.resource.contents == []

    play(scene)


class Shelf(FakeResource):
    """A resource with special methods."""

    def __getitem__(self, place):
        return self.contents[place]

    def __len__(self):
        return len(self.contents)

    async def __aenter__(self):
        return self.contents

    async def __aexit__(self, *_):
        self.contents.append("left")


@dataclass(frozen=True, kw_only=True)
class ShelfSpec(FakeSpec):
    kind = ResourceKind("shelf", Shelf)


def test_a_leased_resource_passes_for_the_resource_itself(play):
    async def scene(engine):
        lease = await engine.acquire(ShelfSpec(), "a")
        shelf = lease.resource
        assert isinstance(shelf, Shelf)
        assert isinstance(shelf, Resource)
        shelf.label = "upper"  # type: ignore[attr-defined]
        async with shelf as contents:
            contents.append("book")
        assert (shelf[0], len(shelf), shelf.label) == ("book", 2, "upper")  # type: ignore[attr-defined]
        assert "label" in vars(shelf)
        assert inspect.iscoroutinefunction(shelf.status)
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copy.copy(shelf)
        await engine.release(lease)
        with pytest.raises(LeaseExpired):
            len(shelf)

    play(scene)


class Pages(FakeResource):
    """A resource with all kinds of methods of which code runs later than they return."""

    ran = 0

    def lines(self):
        try:
            while True:
                self.ran += 1
                yield self.ran
        except ZeroDivisionError:
            yield "thrown"

    def __iter__(self):
        return self.lines()

    def lines_in_other_words(self):
        return self.lines()

    async def lines_later(self):
        return self.lines()

    async def stream(self):
        try:
            while True:
                self.ran += 1
                yield self.ran
        except ZeroDivisionError:
            yield "thrown"

    def __aiter__(self):
        return self.stream()

    @contextmanager
    def opened(self):
        self.ran += 1
        yield self.ran
        self.ran += 1

    @asynccontextmanager
    async def opened_later(self):
        self.ran += 1
        yield self.ran
        self.ran += 1

    def again(self):
        return self

    async def again_later(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.ran += 1


@dataclass(frozen=True, kw_only=True)
class PagesSpec(FakeSpec):
    kind = ResourceKind("pages", Pages)


def test_code_of_a_resource_that_runs_after_its_method_has_returned_ends_with_the_lease(play):
    async def scene(engine):
        lease = await engine.acquire(PagesSpec(capacity=1), "a")
        pages = lease.resource
        iterators = [pages.lines(), iter(pages), pages.lines_in_other_words(), await pages.lines_later()]
        streams = [pages.stream(), aiter(pages)]
        assert [next(one) for one in iterators] == [1, 2, 3, 4]
        assert [await anext(one) for one in streams] == [5, 6]
        never_begun = [pages.lines(), pages.stream()]
        contexts, contexts_later = [pages.opened() for _ in range(2)], [pages.opened_later() for _ in range(2)]
        contexts[0].__enter__()
        await contexts_later[0].__aenter__()
        await engine.release(lease)
        live = engine._instances[lease.instance]
        assert live.ran == 8
        for use in (
            *(partial(next, one) for one in (*iterators, never_begun[0])),
            *(partial(run_now, anext(one)) for one in (*streams, never_begun[1])),
            lambda: contexts[0].__exit__(None, None, None),
            contexts[1].__enter__,
            lambda: run_now(contexts_later[0].__aexit__(None, None, None)),
            lambda: run_now(contexts_later[1].__aenter__()),
        ):
            with pytest.raises(LeaseExpired, match="by a is over"):
                use()
        assert live.ran == 8

    play(scene)


def test_what_a_method_returns_in_place_of_its_resource_ends_with_the_lease(play):
    async def scene(engine):
        lease = await engine.acquire(PagesSpec(), "a")
        async with lease.resource as entered:
            assert lease.resource.again() is await lease.resource.again_later() is entered is lease.resource

    play(scene)


def test_generators_of_a_leased_resource_take_what_is_sent_and_thrown(play):
    async def scene(engine):
        pages = (await engine.acquire(PagesSpec(), "a")).resource
        lines, stream = pages.lines(), pages.stream()
        assert (next(lines), await anext(stream), lines.send("x"), await stream.asend("x")) == (1, 2, 3, 4)
        assert lines.throw(ZeroDivisionError) == await stream.athrow(ZeroDivisionError) == "thrown"
        assert list(lines) == [item async for item in stream] == []
        with pages.opened() as number:
            assert number == 5
        with pytest.raises(KeyError):
            async with pages.opened_later():
                raise KeyError
        assert pages.ran == 7

    play(scene)


def test_the_steps_of_a_generator_count_as_use(play):
    class Slow(FakeResource):
        def steps(self):
            for _ in range(2):
                asyncio.get_running_loop().advance(3)  # type: ignore[attr-defined]
                yield

    @dataclass(frozen=True, kw_only=True)
    class SlowSpec(FakeSpec):
        kind = ResourceKind("slow", Slow)

    async def scene(engine):
        for _ in (await engine.acquire(SlowSpec(), "a")).resource.steps():
            await asyncio.sleep(1)
        assert engine.occupancy()["fake"].busy_seconds == pytest.approx(6)

    play(scene)


def test_sixteen_slow_starts_go_on_at_once_on_the_smallest_machine(play, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})

    async def scene(engine):
        spec = FakeSpec(world=FakeBackend(misbehave("start", lambda: asyncio.sleep(1), times=96)), capacity=16)

        async def rollout(owner):
            lease = await engine.acquire(spec, owner)
            await asyncio.sleep(2)
            await engine.release(lease)

        await asyncio.gather(*(rollout(f"rollout {number}") for number in range(96)))
        assert asyncio.get_running_loop().time() == pytest.approx(1 + 2 * 96 / 16, abs=0.1)

    play(scene)


@pytest.mark.parametrize("starts", [0, -1, 1.5, "8", True])
def test_the_number_of_starts_at_once_is_a_whole_number(starts):
    with pytest.raises(ConfigError, match=r"max_concurrent_starts=.* whole number of at least 1, or None"):
        ResourceEngine(max_concurrent_starts=starts)


def test_concurrent_requests_of_one_owner_get_one_lease(play):
    async def scene(engine):
        spec = FakeSpec()
        leases = await asyncio.gather(*(engine.acquire(spec, "a") for _ in range(10)))
        assert len({lease.id for lease in leases}) == 1
        assert len(spec.world.alive) == 1

    play(scene)


def test_release_returns_before_a_slow_reset_is_done(play):
    async def scene(engine):
        spec = FakeSpec(world=FakeBackend(misbehave("reset", lambda: asyncio.sleep(20))), capacity=1)
        lease = await engine.acquire(spec, "a")
        before = asyncio.get_running_loop().time()
        await engine.release(lease)
        await engine.release(lease)
        assert asyncio.get_running_loop().time() == before
        await engine.acquire(spec, "b")
        assert spec.world.count("reset") == 1

    play(scene)


@pytest.mark.parametrize("act", [raising(ValueError("no such level")), hang, hang_though_cancelled])
def test_a_start_that_fails_fails_its_request_only_and_leaves_nothing(play, act):
    async def scene(engine):
        spec = FakeSpec(world=FakeBackend(misbehave("start", act)), capacity=1)
        results = await asyncio.gather(engine.acquire(spec, "a"), engine.acquire(spec, "b"), return_exceptions=True)
        failed, lease = results
        assert isinstance(failed, ResourceStartError)
        assert str(failed.__cause__) in str(failed)
        assert spec.world.alive == {lease.instance}  # type: ignore[union-attr]

    play(scene)


@pytest.mark.parametrize("operation", ["reset", "status"])
@pytest.mark.parametrize("act", [raising(RuntimeError("broken")), hang, hang_though_cancelled])
def test_an_instance_that_cannot_be_reset_is_replaced(play, operation, act):
    async def scene(engine):
        world = FakeBackend()
        spec = FakeSpec(world=world, capacity=1)
        first = await engine.acquire(spec, "a")
        world.hook = misbehave(operation, act)
        await engine.release(first)
        second = await engine.acquire(spec, "b")
        assert second.instance != first.instance
        assert world.alive == {second.instance}

    play(scene)


@pytest.mark.parametrize("act", [raising(OSError("500")), hang, hang_though_cancelled])
def test_a_release_that_fails_is_tried_again_and_the_slot_is_free_only_once_it_succeeded(play, act):
    async def scene(engine):
        world = FakeBackend(misbehave("release", act))
        spec = FakeSpec(world=world, capacity=1, reuse="recreate")
        await engine.release(await engine.acquire(spec, "a"))
        second = await engine.acquire(spec, "b")
        assert world.alive == {second.instance}
        assert world.count("release") == 2

    play(scene)


def test_an_instance_that_does_not_go_keeps_its_place_is_reported_and_is_tried_until_it_goes(play, caplog):
    async def scene(engine):
        world = FakeBackend(misbehave("release", raising(OSError("busy")), times=5))
        spec = FakeSpec(world=world, capacity=1, reuse="recreate")
        first = await engine.acquire(spec, "a")
        await engine.release(first)
        with pytest.raises(AcquireTimeout):
            await engine.acquire(spec, "b", timeout=1)
        assert states(engine) == ["stuck"]
        assert f"{first.instance} could not be removed: OSError: busy" in caplog.text
        second = await engine.acquire(spec, "b")
        assert world.alive == {second.instance}

    play(scene)


def test_closing_is_over_in_bounded_time_also_if_an_instance_never_goes(tmp_path):
    async def main():
        world = FakeBackend(misbehave("release", hang, times=10**6))
        async with ResourceEngine(ledger=tmp_path) as engine:
            lease = await engine.acquire(FakeSpec(world=world), "a")
        (ledger,) = tmp_path.iterdir()
        assert lease.instance in ledger.read_text()

    run_in_virtual_time(main())


async def test_closing_is_over_though_all_threads_of_the_loop_are_busy_and_the_disk_hangs(tmp_path, monkeypatch):
    hanging, busy = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(busy)
    busy.submit(hanging.wait)
    monkeypatch.setattr(instances, "SYNC_TIMEOUT_S", 0.01)
    monkeypatch.setattr(Ledger, "sync", lambda ledger: hanging.wait())
    try:
        async with asyncio.timeout(30):
            async with ResourceEngine(ledger=tmp_path) as engine:
                await engine.acquire(FakeSpec(), "a")
        assert not list(tmp_path.iterdir())
    finally:
        hanging.set()


def test_fifty_slow_releases_go_on_in_parallel_and_hold_up_nobody(play):
    async def scene(engine):
        async def slow(operation, instance):
            if operation == "release":
                await asyncio.sleep(3)

        spec = FakeSpec(world=FakeBackend(slow), capacity=100, reuse="recreate")
        leases = [await engine.acquire(spec, f"o{n}") for n in range(50)]
        loop = asyncio.get_running_loop()
        before = loop.time()
        for lease in leases:
            await engine.release(lease)
        await asyncio.gather(*(engine.acquire(spec, f"p{n}") for n in range(50)))
        assert loop.time() == before
        assert len(spec.world.alive) == 100
        await asyncio.sleep(3.5)
        assert len(spec.world.alive) == 50

    play(scene)


def test_a_wait_ends_with_the_holders_and_their_ages(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1)
        lease = await engine.acquire(spec, "holder")
        await asyncio.sleep(41)
        with pytest.raises(AcquireTimeout, match=rf"holder has had {lease.instance} for 43\.0 s"):
            await engine.acquire(spec, "late", timeout=2)

    play(scene)


def test_a_timeout_of_zero_takes_what_is_there_and_waits_for_nothing(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1)
        await engine.release(await engine.acquire(spec, "a"))
        await asyncio.sleep(1)
        await engine.acquire(spec, "b", timeout=0)
        with pytest.raises(AcquireTimeout):
            await engine.acquire(spec, "c", timeout=0)

    play(scene)


def test_cancelled_requests_leave_all_slots_free(play):
    async def scene(engine):
        spec = FakeSpec(world=FakeBackend(misbehave("start", lambda: asyncio.sleep(1), 10**6)), capacity=4)
        for n in range(100):
            tasks = [asyncio.create_task(engine.acquire(spec, f"{n}-{k}")) for k in range(8)]
            await asyncio.sleep(0.1 * (n % 20))
            for task in tasks:
                task.cancel()
            for task in await asyncio.gather(*tasks, return_exceptions=True):  # type: ignore[assignment]
                if not isinstance(task, BaseException):
                    await engine.release(task)
        await asyncio.gather(*(engine.acquire(spec, f"last{k}", timeout=5) for k in range(4)))
        assert not [instance for pool in engine.snapshot().pools for instance in pool.queue]

    play(scene)


def test_a_request_that_is_cancelled_in_the_moment_it_is_granted_gives_the_instance_back(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1)
        lease = await engine.acquire(spec, "a")
        waiting = asyncio.create_task(engine.acquire(spec, "b"))
        await asyncio.sleep(0)

        async def cancel_the_next(operation, instance):
            if operation == "status":
                asyncio.get_running_loop().call_soon(waiting.cancel)  # runs between the grant and its delivery

        spec.world.hook = cancel_the_next
        await engine.release(lease)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        spec.world.hook = no_faults
        await engine.acquire(spec, "c", timeout=1)

    play(scene)


def test_resets_that_raise_after_each_use_cost_no_slot(play):
    async def scene(engine):
        spec = FakeSpec(world=FakeBackend(misbehave("reset", raising(OSError("half-open")), 10**6)), capacity=4)
        for n in range(100):
            await engine.release(await engine.acquire(spec, f"o{n}", timeout=60))
        await asyncio.sleep(100)
        await asyncio.gather(*(engine.acquire(spec, f"last{k}", timeout=5) for k in range(4)))
        assert len(spec.world.alive) == 4

    play(scene)


def test_releasing_an_owner_ends_its_leases_and_fails_its_waits(play):
    async def scene(engine):
        one, other = FakeSpec(capacity=1, name="one"), FakeSpec(capacity=1, name="other")
        await engine.acquire(one, "a")
        await engine.acquire(other, "b")
        waiting = asyncio.create_task(engine.acquire(other, "a"))
        await asyncio.sleep(0)
        await engine.release_owner("a")
        with pytest.raises(ResourceError, match="all resources of a were released"):
            await waiting
        await engine.acquire(one, "c", timeout=1)

    play(scene)


def test_a_lease_that_ends_before_its_owner_could_take_it_is_not_given_out(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1)
        first = await engine.acquire(spec, "a")
        waiting = asyncio.create_task(engine.acquire(spec, "b"))
        await asyncio.sleep(0)

        async def end_the_next(operation, instance):
            if operation == "status":
                asyncio.get_running_loop().call_soon(run_now, engine.release_owner("b"))

        spec.world.hook = end_the_next
        await engine.release(first)
        with pytest.raises(ResourceError, match="ended before b received it"):
            await waiting

    play(scene)


def test_a_dead_instance_is_noticed_while_it_is_leased_and_its_rollout_is_told(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1, check_interval_s=10)
        lease = await engine.acquire(spec, "a")
        spec.world.kill(lease.instance)
        await asyncio.sleep(15)
        with pytest.raises(ResourceDied, match="The work of a in it is lost"):
            await engine.acquire(spec, "a")
        other = await engine.acquire(spec, "b", timeout=5)
        assert spec.world.alive == {other.instance}
        await engine.release(lease)

    play(scene)


def test_an_instance_that_says_of_itself_that_it_is_gone_is_replaced_before_its_next_check(play):
    async def scene(engine):
        spec = FakeSpec(check_interval_s=1000)
        lease = await engine.acquire(spec, "a", scope=Scope.GLOBAL)

        async def die(operation, instance):
            if operation == "use":
                spec.world.kill(lease.instance)
                raise ResourceDied(f"{instance} is gone")

        spec.world.hook = die
        with pytest.raises(ResourceDied, match="is gone"):
            await lease.resource.use()
        await asyncio.sleep(1)
        for owner in ("a", "b"):
            other = await engine.acquire(spec, owner, scope=Scope.GLOBAL)
            assert other.instance != lease.instance

    play(scene)


def test_a_leased_instance_is_checked_at_once_if_asked(play):
    async def scene(engine):
        spec = FakeSpec()
        lease = await engine.acquire(spec, "a", scope=Scope.GLOBAL)
        assert await engine.check(lease) is Status.HEALTHY
        spec.world.kill(lease.instance)
        assert await engine.check(lease) is Status.BROKEN
        again = await engine.acquire(spec, "a", scope=Scope.GLOBAL)
        assert again.instance != lease.instance

    play(scene)


def test_a_leased_instance_that_is_too_busy_to_say_how_it_is_is_left_to_its_owner(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1, check_interval_s=10)
        lease = await engine.acquire(spec, "a")
        spec.world.hook = misbehave("status", hang)
        await asyncio.sleep(100)
        assert await engine.acquire(spec, "a") is lease

    play(scene)


def test_an_instance_that_is_checked_while_it_goes_is_not_said_to_have_broken(play):
    events, told = EventStream(), []

    async def scene(engine):
        spec = FakeSpec(capacity=1, idle_timeout_s=10, check_interval_s=9)

        async def slow_to_say(operation, instance):
            if operation == "status":
                await asyncio.sleep(5)

        await engine.release(await engine.acquire(spec, "a"))
        await asyncio.sleep(1)
        spec.world.hook = slow_to_say
        await asyncio.sleep(20)
        assert not spec.world.alive
        assert spec.world.count("status") == 2

    with events.subscribed(lambda event: told.append(type(event).__name__)):
        play(scene, events=events)
    assert "ResourceStopped" in told
    assert "ResourceFailed" not in told


def test_a_spec_that_cannot_say_what_it_has_prepared_fails_its_request_only_and_leaves_nothing(play):
    async def scene(engine):
        spec = SpeechlessSpec(capacity=1)
        with pytest.raises(ResourceStartError, match="no idea which image"):
            await engine.acquire(spec, "a")
        await asyncio.sleep(1)
        assert not engine.snapshot().pools

    play(scene)


class Unspeakable(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("operation", ["prepare", "start", "reset", "status", "release", "freeze", "thaw"])
def test_an_error_that_cannot_say_what_it_is_costs_no_place(play, operation):
    async def scene(engine):
        said = []
        world = FakeBackend(misbehave(operation, raising(Unspeakable())))
        spec = FakeSpec(world=world, capacity=1, image="image", idle="freeze")
        for owner in ("a", "b"):
            try:
                lease = await engine.acquire(spec, owner, timeout=100)
                await asyncio.sleep(1)
                await lease.resource.use()
            except ResourceError as error:
                said.append(str(error))
            await engine.release_owner(owner)
        await engine.acquire(spec, "c", timeout=100)
        assert all("cannot be read" in words for words in said)

    play(scene)


@dataclass(frozen=True, kw_only=True)
class SpeechlessSpec(FakeSpec):
    """A spec that fails when it is asked what has to be prepared."""

    @property
    def preparation_key(self):
        raise LookupError("no idea which image")


def test_an_idle_instance_goes_after_its_time(play):
    async def scene(engine):
        spec = FakeSpec(idle_timeout_s=60)
        await engine.release(await engine.acquire(spec, "a"))
        await asyncio.sleep(59)
        assert len(spec.world.alive) == 1
        await asyncio.sleep(2)
        assert not spec.world.alive
        assert engine.snapshot().pools == ()

    play(scene)


def test_eight_rollouts_that_take_two_resources_in_opposite_order_all_finish_or_are_told(play):
    async def scene(engine):
        box, judge = FakeSpec(name="box", capacity=2), FakeSpec(name="judge", capacity=1, max_concurrency=2)
        wants = [(box, Scope.ROLLOUT), (judge, Scope.GLOBAL)]

        async def rollout(number):
            for attempt in range(20):
                owner = f"r{number}.{attempt}"
                try:
                    for spec, scope in wants if number % 2 else reversed(wants):
                        await engine.acquire(spec, owner, scope=scope)
                        await asyncio.sleep(1)
                    return "finished"
                except DeadlockBroken:
                    continue
                finally:
                    await engine.release_owner(owner)
            return "gave up"

        assert await asyncio.gather(*(rollout(number) for number in range(8))) == ["finished"] * 8

    play(scene)


def test_a_tool_that_needs_a_second_box_of_a_pool_of_one_is_told_at_once(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1)
        await engine.acquire(spec, "a", scope=Scope.CALL)
        with pytest.raises(DeadlockBroken, match="only it could release"):
            await engine.acquire(spec, "a", scope=Scope.CALL)

    play(scene)


def test_parallel_calls_of_one_rollout_take_turns_with_a_pool_of_one(play):
    async def scene(engine):
        spec, inside, most = FakeSpec(capacity=1), 0, 0

        async def call():
            nonlocal inside, most
            lease = await engine.acquire(spec, "a", scope=Scope.CALL)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(5)
            inside -= 1
            await engine.release(lease)

        await asyncio.gather(*(call() for _ in range(5)))
        assert (inside, most) == (0, 1)

    play(scene)


def test_a_spec_that_the_budget_can_never_hold_fails_at_once(play):
    async def scene(engine):
        with pytest.raises(ConfigError, match="cpus 4 of 2"):
            await engine.acquire(FakeSpec(cpus=4), "a")

    play(scene, budget=Budget(cpus=2))


def test_no_more_instances_start_at_once_than_may(play):
    async def scene(engine):
        now, most = 0, 0

        async def counting(operation, instance):
            nonlocal now, most
            if operation == "start":
                now += 1
                most = max(most, now)
                await asyncio.sleep(1)
                now -= 1

        spec = FakeSpec(world=FakeBackend(counting), capacity=20)
        await asyncio.gather(*(engine.acquire(spec, f"o{n}") for n in range(20)))
        assert most == 3

    play(scene, max_concurrent_starts=3)


def test_closing_fails_who_waits_and_releases_what_starts_runs_or_resets(tmp_path):
    async def main():
        world = FakeBackend(misbehave("reset", lambda: asyncio.sleep(5)))
        engine = ResourceEngine(ledger=tmp_path)
        async with engine:
            spec = FakeSpec(world=world, capacity=1, name="one")
            await engine.acquire(spec, "a")
            waiting = asyncio.create_task(engine.acquire(spec, "b"))
            resetting = FakeSpec(world=world, name="two")
            await engine.release(await engine.acquire(resetting, "a"))
            world.hook = misbehave("start", hang)
            starting = asyncio.create_task(engine.acquire(FakeSpec(world=world, name="three"), "c"))
            await asyncio.sleep(0.1)
            assert len(world.alive) == 3
        assert not world.alive
        for task in (waiting, starting):
            with pytest.raises(EngineClosed):
                await task
        with pytest.raises(EngineClosed):
            await engine.acquire(spec, "d")
        await engine.close()

    run_in_virtual_time(main())


def test_closing_goes_on_to_its_end_however_often_it_is_cancelled(tmp_path):
    async def main():
        async def slow(operation, instance):
            if operation == "release":
                await asyncio.sleep(5)

        world = FakeBackend(slow)

        async def work():
            async with ResourceEngine(ledger=tmp_path) as engine:
                for n in range(5):
                    await engine.acquire(FakeSpec(world=world), f"o{n}")
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(1)
        assert len(world.alive) == 5
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(1)
        assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not world.alive

    run_in_virtual_time(main())


def test_when_the_whole_loop_is_torn_down_everything_is_still_released(tmp_path):
    world = FakeBackend()

    async def main():
        async def slow(operation, instance):
            if operation == "release":
                await asyncio.sleep(5)

        world.hook = slow
        engine = await ResourceEngine(ledger=tmp_path).__aenter__()
        for n in range(5):
            await engine.acquire(FakeSpec(world=world), f"o{n}")
        engine.closing = asyncio.create_task(engine.close())  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        raise KeyboardInterrupt  # the second Ctrl-C, which ends the loop and cancels every task in it

    with pytest.raises(KeyboardInterrupt):
        run_in_virtual_time(main())
    assert not world.alive


def test_an_engine_in_another_loop_says_so(tmp_path):
    async def main():
        async with ResourceEngine(ledger=tmp_path) as engine:
            failures = []

            def elsewhere():
                try:
                    asyncio.run(engine.acquire(FakeSpec(), "a"))
                except UsageError as error:
                    failures.append(str(error))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert "another event loop" in failures[0]

    asyncio.run(main())


async def test_an_engine_outside_its_block_says_so(tmp_path):
    with pytest.raises(UsageError, match="async with"):
        await ResourceEngine(ledger=tmp_path).acquire(FakeSpec(), "a")


@dataclass(frozen=True, kw_only=True)
class ListSpec(FakeSpec):
    names: list[str] = field(default_factory=list)


class UnknownSpec(ResourceSpec):
    pass


async def test_specs_that_cannot_be_used_are_refused_with_the_cure(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        with pytest.raises(UsageError, match="tuple instead of a list"):
            await engine.acquire(ListSpec(), "a")
        with pytest.raises(UsageError, match="ResourceKind"):
            await engine.acquire(UnknownSpec(), "a")
        with pytest.raises(UsageError, match="takes a ResourceSpec"):
            await engine.acquire("python:3.11", "a")  # type: ignore[arg-type]


def test_every_request_and_instance_can_be_followed_in_the_events(play):
    events = EventStream()
    told = []

    async def scene(engine):
        spec = FakeSpec(capacity=1)
        lease = await engine.acquire(spec, "a")
        waiting = asyncio.create_task(engine.acquire(spec, "b"))
        with pytest.raises(AcquireTimeout):
            await engine.acquire(spec, "c", timeout=1)
        waiting.cancel()
        await asyncio.wait({waiting})
        await engine.release(lease)
        await asyncio.sleep(1)
        spec.world.kill(lease.instance)
        await asyncio.sleep(60)

    with events.subscribed(lambda event: told.append(type(event).__name__)):
        play(scene, events=events)
    assert told == [
        *("LeaseRequested", "ResourceStarting", "ResourceStarted", "LeaseGranted"),
        *("LeaseRequested", "LeaseRequested", "LeaseRefused", "LeaseRefused"),
        *("LeaseReleased", "ResourceReset", "ResourceFailed", "ResourceStopped"),
    ]


def test_the_snapshot_tells_who_has_what_and_who_waits(play):
    async def scene(engine):
        spec = FakeSpec(capacity=1, name="box")
        lease = await engine.acquire(spec, "a")
        waiting = asyncio.create_task(engine.acquire(spec, "b", priority=2))
        await asyncio.sleep(3)
        (pool,) = engine.snapshot().pools
        assert (pool.label, pool.capacity) == ("box", 1)
        (instance,) = pool.instances
        assert (instance.name, instance.state, instance.owners) == (lease.instance, "leased", ("a",))
        assert instance.age_seconds == pytest.approx(3)
        (wait,) = pool.queue
        assert (wait.owner, wait.priority, wait.waited_seconds) == ("b", 2, pytest.approx(3))
        assert engine.snapshot().to_json()["pools"][0]["label"] == "box"
        waiting.cancel()
        await asyncio.wait({waiting})

    play(scene)
