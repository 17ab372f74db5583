"""Several resources in one request, and several replicas of a shared one, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from agentfly.core.errors import AcquireTimeout, ConfigError, ResourceDied, ResourceStartError, UsageError
from agentfly.resources.engine.engine import Budget, ResourceEngine
from agentfly.testing.fake_resource import FakeBackend, FakeSpec
from tests.support.virtual_time import run_in_virtual_time


@pytest.fixture
def play(tmp_path):
    def run(scene, **settings):
        async def main():
            async with ResourceEngine(ledger=tmp_path, **settings) as engine:
                return await scene(engine)

        return run_in_virtual_time(main())

    return run


def spec(name, capacity=1, **fields):
    return FakeSpec(world=FakeBackend(), name=name, capacity=capacity, **fields)


def owners(engine):
    return {pool.label: [owner for one in pool.instances for owner in one.owners] for pool in engine.snapshot().pools}


def test_who_needs_two_holds_neither_until_both_can_be_had(play):
    async def scene(engine):
        box, judge = spec("box"), spec("judge")
        taken = await engine.acquire(judge, "first")
        both = asyncio.create_task(engine.acquire_all([box, judge], "second"))
        await asyncio.sleep(1)
        assert owners(engine) == {"box": [], "judge": ["first"]}
        await engine.release(taken)
        leases = await both
        assert [lease.spec for lease in leases] == [box, judge]

    play(scene)


def test_many_who_take_two_pools_in_opposite_order_all_finish_without_a_failure(play):
    async def scene(engine):
        box, judge = spec("box", 2), spec("judge", 2)

        async def work(number):
            needs = [box, judge] if number % 2 else [judge, box]
            await engine.acquire_all(needs, f"r{number}")
            await asyncio.sleep(1)
            await engine.release_owner(f"r{number}")

        await asyncio.gather(*(work(number) for number in range(40)))
        return asyncio.get_running_loop().time()

    assert play(scene) == pytest.approx(20)  # two at a time: nobody waited for longer than for those before it


def test_what_comes_free_for_who_needs_two_is_kept_from_those_who_came_later(play):
    async def scene(engine):
        box, judge = spec("box"), spec("judge")
        boxes, judges = await engine.acquire(box, "a"), await engine.acquire(judge, "b")
        got = []

        async def note(wanted, owner):
            await engine.acquire_all(wanted, owner)
            got.append(owner)
            await asyncio.sleep(5)
            await engine.release_owner(owner)

        waits = [asyncio.create_task(note([box, judge], "both"))]
        await asyncio.sleep(1)
        waits.append(asyncio.create_task(note([box], "later")))
        await engine.release(boxes)
        await asyncio.sleep(10)
        assert got == []
        await engine.release(judges)
        await asyncio.gather(*waits)
        assert got == ["both", "later"]

    play(scene)


def test_nothing_is_had_at_once_and_the_same_twice_is_one(play):
    async def scene(engine):
        box = spec("box")
        assert await engine.acquire_all([], "a") == ()
        first, second = await engine.acquire_all([box, box], "a")
        assert first is second
        with pytest.raises(UsageError, match="takes a ResourceSpec"):
            await engine.acquire_all([box, "judge"], "a")

    play(scene)


def test_who_asked_for_one_and_for_two_gets_the_same_instance_in_both(play):
    async def scene(engine):
        box, judge = spec("box", 2), spec("judge", 2)
        one, (box_lease, _) = await asyncio.gather(engine.acquire(box, "a"), engine.acquire_all([box, judge], "a"))
        assert box_lease is one
        again = await engine.acquire_all([judge, box], "a")
        assert again[1] is one
        assert owners(engine)["box"] == ["a"]

    play(scene)


def test_a_start_that_fails_fails_the_whole_request_and_holds_nothing_back(play):
    async def scene(engine):
        good, bad = spec("good"), spec("bad")

        async def refuse(operation, instance):
            if operation == "start":
                raise OSError("no such image")

        bad.world.hook = refuse
        with pytest.raises(ResourceStartError, match="no such image"):
            await engine.acquire_all([good, bad], "a")
        assert (await engine.acquire(good, "b", timeout=5)).owner == "b"

    play(scene)


def test_a_request_for_two_that_takes_too_long_says_who_has_what_is_lacking_and_who_waits(play):
    async def scene(engine):
        box, judge = spec("box"), spec("judge")
        await engine.acquire(judge, "holder")
        await asyncio.sleep(2)
        other = asyncio.create_task(engine.acquire(judge, "before"))
        await asyncio.sleep(1)
        with pytest.raises(AcquireTimeout) as caught:
            await engine.acquire_all([box, judge], "late", timeout=4)
        message = str(caught.value)
        assert "holder has had judge" in message
        assert "for 7.0 s" in message
        assert "2 waiting: before for 5.0 s, late for 4.0 s" in message
        assert "box" not in message  # there was one for it
        other.cancel()
        assert (await engine.acquire(box, "next", timeout=1)).owner == "next"

    play(scene)


def test_a_queue_is_told_as_far_as_a_message_can_bear(play):
    async def scene(engine):
        box = spec("box")
        await engine.acquire(box, "holder")
        waits = [asyncio.create_task(engine.acquire(box, f"w{number}")) for number in range(100)]
        await asyncio.sleep(1)
        with pytest.raises(AcquireTimeout) as caught:
            await engine.acquire(box, "late", timeout=1)
        assert "101 waiting" in str(caught.value)
        assert "and 93 more" in str(caught.value)
        for wait in waits:
            wait.cancel()

    play(scene)


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 4])
def test_a_cancelled_request_for_two_leaves_nothing_held(play, moment):
    async def scene(engine):
        box, judge = spec("box"), spec("judge")

        async def dawdle(operation, instance):
            await asyncio.sleep(1.5)

        box.world.hook = dawdle
        asking = asyncio.create_task(engine.acquire_all([box, judge], "a"))
        await asyncio.sleep(moment)
        asking.cancel()
        await asyncio.wait({asking})
        leases = await engine.acquire_all([judge, box], "b", timeout=10)
        assert {lease.owner for lease in leases} == ({"b"} if asking.cancelled() else set())

    if moment < 2:
        play(scene)
    else:
        with pytest.raises(AcquireTimeout, match="a has"):
            play(scene)


def test_two_that_fit_the_budget_one_by_one_but_not_together_are_refused_at_once(play):
    async def scene(engine):
        with pytest.raises(ConfigError, match=r"one instance each exceeds .* cpus 3 of 2"):
            await engine.acquire_all([spec("box", cpus=1), spec("large", cpus=2)], "a")

    play(scene, budget=Budget(cpus=2))


def test_requests_for_two_share_a_tight_budget_without_blocking_each_other(play):
    async def scene(engine):
        box, judge = spec("box", 4, cpus=1), spec("judge", 4, cpus=1)

        async def work(number):
            await engine.acquire_all([box, judge], f"r{number}")
            await asyncio.sleep(1)
            await engine.release_owner(f"r{number}")

        await asyncio.gather(*(work(number) for number in range(10)))

    play(scene, budget=Budget(cpus=3))


def test_a_holder_who_is_blocked_by_what_is_kept_for_another_gets_it(play):
    async def scene(engine):
        box, judge = spec("box"), spec("judge")
        await engine.acquire(box, "holder")
        both = asyncio.create_task(engine.acquire_all([judge, box], "both"))
        await asyncio.sleep(1)
        await engine.acquire(judge, "holder", timeout=10)  # kept for `both`, which waits for the holder's box
        await engine.release_owner("holder")
        await both

    play(scene)


def test_what_died_of_a_set_is_not_replaced_behind_the_owners_back(play):
    async def scene(engine):
        box, judge = spec("box", check_interval_s=1), spec("judge")
        first, _ = await engine.acquire_all([box, judge], "a")
        box.world.kill(first.instance)
        await asyncio.sleep(5)
        with pytest.raises(ResourceDied):
            await engine.acquire_all([box, judge], "a")

    play(scene)


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_another_replica_starts_when_the_seats_are_taken_and_no_more_than_there_may_be(play):
    async def scene(engine):
        judge = spec("judge", 8, replicas=2, max_concurrency=2)
        leases = [await engine.acquire(judge, f"o{number}", scope="global") for number in range(4)]
        assert [lease.instance for lease in leases[:2]] == [leases[0].instance] * 2
        assert len({lease.instance for lease in leases}) == 2
        with pytest.raises(AcquireTimeout):
            await engine.acquire(judge, "o4", scope="global", timeout=5)
        await engine.release(leases[0])
        assert (await engine.acquire(judge, "o4", scope="global")).instance == leases[0].instance

    play(scene)


def test_replicas_without_a_limit_share_the_load_and_nobody_waits_for_them(play):
    async def scene(engine):
        index = spec("index", 8, replicas=3)

        async def slow(operation, instance):
            if operation == "start":
                await asyncio.sleep(10)

        await engine.acquire(index, "o0", scope="global")
        index.world.hook = slow
        held = {"o1": await engine.acquire(index, "o1", scope="global", timeout=1)}
        for number in range(2, 9):
            await asyncio.sleep(11)
            held[f"o{number}"] = await engine.acquire(index, f"o{number}", scope="global", timeout=1)
        instances = engine.snapshot().pools[0].instances
        assert sorted(len(instance.owners) for instance in instances) == [3, 3, 3]

    play(scene)


def test_an_instance_that_is_ready_for_one_alone_is_no_further_replica(play):
    async def scene(engine):
        index = spec("index", 3, replicas=2)
        for number in range(2):
            await engine.acquire(index, f"o{number}", scope="global")
            await asyncio.sleep(1)
        shared = set(index.world.alive)
        assert len(shared) == 2
        await engine.release(await engine.acquire(index, "alone"))
        await asyncio.sleep(1)
        assert {(await engine.acquire(index, f"n{number}", scope="global")).instance for number in range(2)} == shared

    play(scene)


def test_replicas_that_nobody_uses_are_released(play):
    async def scene(engine):
        index = spec("index", 8, replicas=3, idle_timeout_s=60)
        for number in range(6):
            await engine.acquire(index, f"o{number}", scope="global")
            await asyncio.sleep(1)
        assert len(index.world.alive) == 3
        for number in range(6):
            await engine.release_owner(f"o{number}")
        await asyncio.sleep(200)
        assert not index.world.alive

    play(scene)


def test_one_who_needs_an_instance_alone_is_not_held_up_by_those_who_wait_for_a_seat(play):
    async def scene(engine):
        judge = spec("judge", 2, replicas=1, max_concurrency=1)
        await engine.acquire(judge, "seated", scope="global")
        waiting = asyncio.create_task(engine.acquire(judge, "waits", scope="global"))
        await asyncio.sleep(1)
        assert (await engine.acquire(judge, "alone", timeout=1)).owner == "alone"
        assert not waiting.done()
        waiting.cancel()

    play(scene)


# --- loops and threads ------------------------------------------------------------------------------------------------


def test_a_closed_loop_a_thread_and_another_loop_are_told_apart_from_the_engines_own(tmp_path):
    box = spec("box")
    engine = ResourceEngine(ledger=tmp_path)

    async def enter():
        async with engine:
            with pytest.raises(UsageError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, engine.acquire(box, "a"))
            with pytest.raises(UsageError, match="no event loop runs in this thread"):
                await asyncio.to_thread(_step, engine.acquire(box, "a"))
            await engine.acquire(box, "a")

    asyncio.run(enter())
    with pytest.raises(UsageError, match=r"is closed\. Enter another"):
        asyncio.run(engine.acquire(box, "b"))


def _step(coroutine):
    try:
        coroutine.send(None)
    finally:
        coroutine.close()
