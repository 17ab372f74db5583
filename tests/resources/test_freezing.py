"""Freezing: an idle instance is frozen and thawed for its next use, also with concurrent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, LeaseExpired, ResourceDied, ResourceStartError, UsageError
from agentfly.core.events import EventStream, LeaseReleased
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.freezer import CHANGE_TIMEOUT_S, FREEZE_AFTER_S
from agentfly.resources.kind import ResourceKind
from agentfly.resources.resource import Resource, Scope, Status
from agentfly.resources.spec import ResourceSpec
from agentfly.testing.fake_resource import FakeBackend, FakeResource, FakeSpec, no_faults
from tests.support.virtual_time import run_in_virtual_time

A_MOMENT = 2 * FREEZE_AFTER_S


@pytest.fixture
def play(tmp_path):
    """Run ``scene(engine, spec)`` in virtual time; afterwards nothing is alive in the world."""

    def run(scene, events=None, **fields):
        async def main():
            spec = FakeSpec(idle="freeze", check_interval_s=None, **fields)
            async with ResourceEngine(ledger=tmp_path, events=events) as engine:
                await scene(engine, spec)
            assert not spec.world.alive
            assert not spec.world.frozen
            assert not list(tmp_path.iterdir())

        run_in_virtual_time(main())

    return run


async def until(holds):
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def taking(seconds, *operations):
    async def behave(operation, instance):
        if operation in operations:
            await asyncio.sleep(seconds)

    return behave


def failing(*operations):
    async def behave(operation, instance):
        if operation in operations:
            raise OSError(f"{operation} failed")

    return behave


def hanging(*operations):
    async def behave(operation, instance):
        if operation in operations:
            await asyncio.Event().wait()

    return behave


def test_a_leased_instance_is_frozen_between_its_uses_and_runs_for_each(play):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        await lease.resource.use()
        for _ in range(3):
            await asyncio.sleep(A_MOMENT)
            assert spec.world.frozen == {lease.instance}
            await lease.resource.use()  # fails if it is frozen
            assert not spec.world.frozen

    play(scene)


def test_an_instance_that_nobody_has_is_frozen_too_and_thawed_for_its_reset(play):
    async def scene(engine, spec):
        first = await engine.acquire(spec, "a")
        await asyncio.sleep(A_MOMENT)
        assert spec.world.frozen
        await engine.release(first)
        await asyncio.sleep(A_MOMENT)
        assert spec.world.frozen == {first.instance}
        second = await engine.acquire(spec, "b")
        assert second.instance == first.instance
        await second.resource.use()
        done = [operation for operation, _ in spec.world.history]
        assert done.index("thaw") < done.index("reset") < done.index("use")

    play(scene, capacity=1)


def test_uses_in_a_row_cost_no_freezes(play):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        for _ in range(10):
            await lease.resource.use()
            await asyncio.sleep(FREEZE_AFTER_S / 2)
        assert spec.world.count("freeze") == 0

    play(scene)


def test_nothing_is_frozen_while_a_call_of_its_rollout_is_under_way(play):
    async def scene(engine, spec):
        context = Context(Trajectory("r0", "g0", Task("do it")), engine)
        async with context.call() as call:
            box = await call.acquire(spec)
            await box.use()
            await asyncio.sleep(10)
            assert not spec.world.frozen
            async with context.call():
                pass
            await asyncio.sleep(10)
            assert not spec.world.frozen, "another call of the rollout ended, but this one goes on"
        await asyncio.sleep(A_MOMENT)
        assert spec.world.frozen, "the model thinks"
        async with context.call() as call:
            await (await call.acquire(spec)).use()
            await asyncio.sleep(10)
            assert not spec.world.frozen
        await context.close()

    play(scene)


def test_a_long_use_keeps_it_running_beside_short_ones(play):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        spec.world.hook = taking(60, "use")
        long = asyncio.create_task(lease.resource.use())
        await asyncio.sleep(1)
        spec.world.hook = no_faults
        await lease.resource.use()
        await long
        assert spec.world.count("freeze") == 0

    play(scene)


def test_a_use_that_comes_during_a_freeze_waits_for_it_and_thaws(play):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        spec.world.hook = taking(1, "freeze", "thaw")
        await asyncio.sleep(A_MOMENT)
        assert spec.world.count("freeze") == 1
        await asyncio.gather(*(lease.resource.use() for _ in range(5)))
        assert spec.world.count("thaw") == 1

    play(scene)


def test_a_use_that_is_cancelled_while_it_waits_for_the_thaw_harms_no_other(play):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        await asyncio.sleep(A_MOMENT)
        spec.world.hook = taking(1, "thaw")
        given_up, patient = (asyncio.create_task(lease.resource.use()) for _ in range(2))
        await asyncio.sleep(0.5)
        given_up.cancel()
        await patient
        await asyncio.sleep(A_MOMENT)
        assert spec.world.frozen, "and it is frozen again once it is not used"

    play(scene)


def test_a_freeze_that_fails_leaves_the_instance_running_and_is_not_tried_again(play, caplog):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        spec.world.hook = failing("freeze")
        for _ in range(3):
            await asyncio.sleep(A_MOMENT)
            await lease.resource.use()
        assert spec.world.count("freeze") == 1

    play(scene)
    assert "could not be frozen" in caplog.text


@pytest.mark.parametrize("broken", [failing("thaw"), hanging("thaw")])
def test_an_instance_that_cannot_be_thawed_is_lost_to_its_owner_and_replaced(play, broken):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        await asyncio.sleep(A_MOMENT)
        spec.world.hook = broken
        with pytest.raises(ResourceDied, match="could not be thawed"):
            await lease.resource.use()
        with pytest.raises(ResourceDied):
            await engine.acquire(spec, "a")
        await engine.release_owner("a")
        spec.world.hook = no_faults
        other = await engine.acquire(spec, "b")
        assert other.instance != lease.instance

    play(scene, capacity=1)


@pytest.mark.parametrize("stuck", [hanging("freeze"), taking(1, "freeze"), failing("thaw"), hanging("thaw")])
def test_what_is_frozen_or_being_frozen_is_removed_in_bounded_time(play, stuck):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        spec.world.hook = stuck
        await asyncio.sleep(A_MOMENT)
        assert spec.world.frozen
        began = asyncio.get_running_loop().time()
        await engine.release(lease)
        await until(lambda: not spec.world.alive)
        assert asyncio.get_running_loop().time() - began < CHANGE_TIMEOUT_S + 4 * spec.release_timeout_s

    play(scene, reuse="recreate", release_timeout_s=3.0)


def test_a_frozen_instance_that_dies_is_noticed_by_its_check_without_a_thaw(play):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        await asyncio.sleep(A_MOMENT)
        assert await engine.check(lease) is Status.HEALTHY
        assert spec.world.count("thaw") == 0
        spec.world.kill(lease.instance)
        assert await engine.check(lease) is Status.BROKEN

    play(scene)


def test_a_shared_instance_is_frozen_only_when_none_of_its_owners_is_in_a_call(play):
    async def scene(engine, spec):
        leases = [await engine.acquire(spec, owner, scope=Scope.GLOBAL) for owner in "ab"]
        with engine.active_call("b"):
            await leases[0].resource.use()
            await asyncio.sleep(A_MOMENT)
            assert not spec.world.frozen
        await asyncio.sleep(A_MOMENT)
        assert spec.world.frozen

    play(scene)


def test_an_owner_cannot_freeze_behind_the_engines_back(play):
    async def scene(engine, spec):
        lease = await engine.acquire(spec, "a")
        with pytest.raises(UsageError, match="idle='freeze'"):
            await lease.resource.freeze()

    play(scene)


class Stone(Resource):
    """A kind that cannot be frozen."""

    async def start(self):
        pass

    async def reset(self):
        pass

    async def status(self):
        return Status.HEALTHY

    async def release(self):
        pass


@dataclass(frozen=True, kw_only=True)
class StoneSpec(ResourceSpec[Stone]):
    kind = ResourceKind("stone", Stone)


class MadeStoneSpec(StoneSpec):
    kind = ResourceKind("stone", partial(Stone))  # a factory: the error comes at its start


async def test_a_kind_that_cannot_freeze_says_so_at_once_with_the_cure(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        with pytest.raises(ConfigError, match=r"stone cannot be frozen\. Write idle='run'"):
            await engine.acquire(StoneSpec(idle="freeze"), "a")
        with pytest.raises(ResourceStartError, match="stone cannot be frozen"):
            await engine.acquire(MadeStoneSpec(idle="freeze"), "a")
    with pytest.raises(ConfigError, match="'run' or 'freeze'"):
        FakeSpec(idle="sleep")  # type: ignore[arg-type]


async def test_a_sync_tool_on_a_thread_uses_a_frozen_instance_like_any_other(tmp_path):
    spec = FakeSpec(idle="freeze")
    async with ResourceEngine(ledger=tmp_path) as engine:
        context = Context(Trajectory("r0", "g0", Task("do it")), engine)
        box = await context.acquire(spec)
        await until(lambda: spec.world.frozen)

        def tool(call):
            call.wait(box.use())
            with pytest.raises(UsageError, match=r"context\.wait"):
                asyncio.run(box.use())

        async with context.call() as call:
            await asyncio.to_thread(tool, call)
        assert spec.world.count("use") == 1


# --- held and busy time ---------------------------------------------------------------------------------------------


def test_held_and_busy_time_are_measured_for_each_lease_instance_and_pool(play):
    released = []
    events = EventStream()

    async def scene(engine, spec):
        spec.world.hook = taking(2, "use")
        lease = await engine.acquire(spec, "a")
        await asyncio.gather(lease.resource.use(), lease.resource.use())  # at once: 2 s in all
        await asyncio.sleep(7)
        await lease.resource.use()
        (pool,) = engine.snapshot().pools
        (instance,) = pool.instances
        assert (instance.held_seconds, instance.busy_seconds) == pytest.approx((11, 4))
        with engine.active_call("a"):
            await asyncio.sleep(3)
        await engine.release(lease)
        await asyncio.sleep(5)
        occupancy = engine.occupancy()["box"]
        assert (occupancy.leases, occupancy.held_seconds, occupancy.busy_seconds) == pytest.approx((1, 14, 4))
        assert occupancy.alive_seconds == pytest.approx(19)

    with events.subscribed(lambda event: released.append(event) if isinstance(event, LeaseReleased) else None):
        play(scene, events, name="box", reuse="reset")
    (event,) = released
    assert (event.held_seconds, event.busy_seconds) == pytest.approx((14, 4))


def test_what_is_gone_stays_in_the_totals_and_a_use_that_outlives_its_lease_counts_no_more(play):
    async def scene(engine, spec):
        spec.world.hook = taking(100, "use")
        lease = await engine.acquire(spec, "a")
        outlived = asyncio.create_task(lease.resource.use())
        await asyncio.sleep(3)
        await engine.release(lease)
        with pytest.raises(LeaseExpired):
            await lease.resource.use()
        await asyncio.sleep(200)
        assert not spec.world.alive
        await asyncio.wait({outlived})
        occupancy = engine.occupancy()["box"]
        assert (occupancy.held_seconds, occupancy.busy_seconds) == pytest.approx((3, 3))

    play(scene, name="box", reuse="recreate")


def test_the_leases_of_a_shared_instance_have_busy_times_of_their_own(play):
    async def scene(engine, spec):
        spec.world.hook = taking(2, "use")
        leases = [await engine.acquire(spec, owner, scope=Scope.GLOBAL) for owner in "ab"]
        await asyncio.gather(*(lease.resource.use() for lease in leases))
        await leases[0].resource.use()
        ((instance,),) = [pool.instances for pool in engine.snapshot().pools]
        assert (instance.held_seconds, instance.busy_seconds) == pytest.approx((4, 4))

    play(scene)


def test_sync_methods_and_async_iterations_count_as_use(play):
    class Talking(FakeResource):
        async def talk(self):
            for word in ("one", "two"):
                await asyncio.sleep(1)
                yield word

        def moan(self):
            asyncio.get_running_loop().advance(3)  # type: ignore[attr-defined]

    @dataclass(frozen=True, kw_only=True)
    class TalkingSpec(FakeSpec):
        kind = ResourceKind("talking", Talking)

    async def scene(engine, _):
        lease = await engine.acquire(TalkingSpec(idle="freeze"), "a")
        await asyncio.sleep(A_MOMENT)
        assert [word async for word in lease.resource.talk()] == ["one", "two"]
        lease.resource.moan()
        assert engine.occupancy()["fake"].busy_seconds == pytest.approx(5)

    play(scene)


# --- all at once ----------------------------------------------------------------------------------------------------


async def live_through(seed, directory):
    draw = random.Random(seed)

    async def misbehave(operation, instance):
        if operation == "use":
            await asyncio.sleep(draw.choice([0, 0.01, 1]))
        match draw.randrange(30):
            case 0 if operation != "use":
                raise OSError(f"{operation} of {instance} failed")
            case 1 if operation != "use":
                await asyncio.Event().wait()
            case 2 | 3 | 4:
                await asyncio.sleep(draw.uniform(0, 0.3))

    world = FakeBackend(misbehave)
    limits: dict[str, Any] = {"start_timeout_s": 4.0, "reset_timeout_s": 2.0, "release_timeout_s": 1.0}
    spec = FakeSpec(world=world, capacity=2, idle="freeze", check_interval_s=1, **limits)
    told = SimpleNamespace(violations=[])

    async def rollout(engine, owner):
        with contextlib.suppress(ResourceDied, LeaseExpired, ResourceStartError):
            for _ in range(draw.randrange(1, 5)):
                with engine.active_call(owner) if draw.random() < 0.7 else contextlib.nullcontext():
                    lease = await engine.acquire(spec, owner)
                    uses = [asyncio.create_task(lease.resource.use()) for _ in range(draw.randrange(1, 3))]
                    if draw.random() < 0.2:
                        await asyncio.sleep(draw.uniform(0, 0.2))
                        uses[0].cancel()
                    done, _ = await asyncio.wait(uses)
                    told.violations += [
                        str(task.exception())
                        for task in done
                        if not task.cancelled() and isinstance(task.exception(), AssertionError)
                    ]
                await asyncio.sleep(draw.choice([0, FREEZE_AFTER_S, 0.2, 3]))
        await engine.release_owner(owner)

    async with ResourceEngine(ledger=directory) as engine:
        rollouts = [asyncio.create_task(rollout(engine, f"r{n}")) for n in range(8)]
        await asyncio.wait(rollouts, timeout=draw.choice([2, 5, None]))
        if draw.random() < 0.5:
            world.hook = no_faults
        for task in rollouts:
            task.cancel()
        await asyncio.wait(rollouts)
        world.hook = no_faults
        await asyncio.sleep(700)
    assert told.violations == []
    assert not world.alive
    assert not world.frozen


@pytest.mark.parametrize("seed", range(30))
def test_in_a_random_history_nothing_is_used_while_it_is_frozen_and_nothing_is_left(seed, tmp_path):
    logging.disable(logging.CRITICAL)
    try:
        run_in_virtual_time(live_through(seed, tmp_path))
    finally:
        logging.disable(logging.NOTSET)
