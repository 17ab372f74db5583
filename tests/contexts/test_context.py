"""Context: one instance per rollout, prepared once, and everything released at the end."""

import asyncio
from dataclasses import dataclass, field

import pytest

import agentfly as af
from agentfly.contexts.context import Context
from agentfly.core.errors import (
    AcquireTimeout,
    DeadlockBroken,
    LeaseExpired,
    ResourceError,
    ResourceStartError,
    RewardError,
    ToolTimeout,
    UsageError,
)
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory, Turn
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.kind import ResourceKind
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec


class Box(Resource):
    """A resource that remembers what was put into it until it is reset."""

    async def start(self):
        self.contents = []

    async def reset(self):
        self.contents = []

    async def status(self):
        return Status.HEALTHY

    async def release(self):
        pass


@dataclass(frozen=True, kw_only=True)
class BoxSpec(ResourceSpec[Box]):
    kind = ResourceKind("test-box", Box)
    colour: str = field(default="red")


@pytest.fixture
async def engine(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        yield engine


def context(engine, name="r0", **fields):
    return Context(Trajectory(name, "g0", Task("do it", fields)), engine)


async def test_a_rollout_gets_the_same_instance_in_every_call_also_concurrently(engine):
    first = context(engine)
    boxes = await asyncio.gather(*(first.acquire(BoxSpec()) for _ in range(5)))
    assert len({id(box) for box in boxes}) == 1
    assert await first.acquire(BoxSpec()) is boxes[0]


async def test_specs_that_differ_in_anything_are_different_instances(engine):
    first = context(engine)
    assert await first.acquire(BoxSpec()) is not await first.acquire(BoxSpec(colour="blue"))


async def test_two_rollouts_never_share_a_rollout_instance_but_do_share_a_global_one(engine):
    first, second = context(engine, "r0"), context(engine, "r1")
    assert await first.acquire(BoxSpec()) is not await second.acquire(BoxSpec())
    shared = BoxSpec(colour="shared")
    one, other = await first.acquire(shared, scope="global"), await second.acquire(shared, "global")
    assert one.instance == other.instance


async def test_what_a_rollout_left_behind_is_never_seen_by_the_next(engine):
    spec = BoxSpec(capacity=1)
    first, second = context(engine, "r0"), context(engine, "r1")
    (await first.acquire(spec)).contents.append("secret")
    await first.close()
    assert (await second.acquire(spec)).contents == []


async def test_a_full_pool_makes_the_next_rollout_wait_until_the_first_has_ended(engine):
    spec = BoxSpec(capacity=1)
    first, second = context(engine, "r0"), context(engine, "r1")
    await first.acquire(spec)
    waiting = asyncio.create_task(second.acquire(spec))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await first.close()
    await waiting
    assert second.waited_seconds > 0


@pytest.fixture
async def busy(engine):
    """A pool of one whose only instance another rollout holds until the event is set."""
    spec, give_back = BoxSpec(capacity=1), asyncio.Event()
    holder = context(engine, "holder")
    await holder.acquire(spec)

    async def hold():
        await give_back.wait()
        await holder.close()

    holding = asyncio.create_task(hold())
    yield spec, give_back
    give_back.set()
    await holding


async def call_of(whole, tool, **arguments):
    """A call of a tool as a rollout makes it, with a context of its own."""
    async with whole.call() as of_call:
        return (await tool.call(arguments, of_call)).observation


LIMIT_S = 0.03


async def wait_for_it(context):
    await asyncio.sleep(0)
    return str((await context.acquire(context.task["spec"], scope="call")).contents)


def wait_on_a_thread(context):
    return str(context.wait(context.acquire(context.task["spec"], scope="call")).contents)


async def wait_in_a_task(context):
    return await asyncio.create_task(wait_for_it(context))


async def wait_twice_at_once(context):
    one, other = await asyncio.gather(*(context.acquire(context.task["spec"]) for _ in range(2)))
    assert one is other
    return str(one.contents)


class Holder:
    """Its methods ask by the context that the instance was made with."""

    def __init__(self, context: Context):
        self._context = context

    async def get(self) -> str:
        """Get it."""
        async with self._context.lease(self._context.task["spec"]) as box:
            return str(box.contents)


def tool_that(get):
    if isinstance(get, type):
        return next(iter(af.Agent(model="m", tools=[af.tool(timeout_s=LIMIT_S)(get)]).tools))  # type: ignore[list-item]
    if asyncio.iscoroutinefunction(get):

        @af.tool(timeout_s=LIMIT_S)
        async def run(context: Context) -> str:
            """Get it."""
            return await get(context)
    else:

        @af.tool(timeout_s=LIMIT_S)
        def run(context: Context) -> str:
            """Get it."""
            return get(context)

    return run


@pytest.mark.parametrize("get", [wait_for_it, wait_on_a_thread, wait_in_a_task, wait_twice_at_once, Holder])
async def test_time_that_a_call_waits_for_a_resource_is_not_counted_however_it_asks(engine, busy, get):
    spec, give_back = busy
    calling = asyncio.create_task(call_of(context(engine, spec=spec), tool_that(get)))
    await asyncio.sleep(4 * LIMIT_S)
    assert not calling.done()
    give_back.set()
    assert await calling == "[]"


@pytest.mark.parametrize("waiting", [1, 2])
async def test_the_time_of_a_call_runs_on_while_others_of_its_rollout_wait_for_resources(engine, busy, waiting):
    spec, _ = busy
    rollout = context(engine, spec=spec)
    waits = [asyncio.create_task(call_of(rollout, tool_that(wait_for_it))) for _ in range(waiting)]
    await asyncio.sleep(0.01)

    @af.tool(timeout_s=LIMIT_S)
    async def hang() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return "never"

    with pytest.raises(ToolTimeout):
        await asyncio.wait_for(call_of(rollout, hang), timeout=5)
    assert not any(one.done() for one in waits)
    for one in waits:
        one.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_the_time_of_a_turns_reward_runs_on_while_that_of_another_turn_waits_for_a_resource(engine, busy):
    spec, _ = busy
    rollout = context(engine, spec=spec)
    rollout.trajectory.turns += [Turn(index, 0, 0, 1, "said", True) for index in range(2)]

    @af.reward(per_turn=True, timeout_s=LIMIT_S)
    async def look(turn: Turn, context: Context) -> float:
        if turn.index == 0:
            await context.acquire(spec)
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RewardError, match="0\\.03"):
        await asyncio.wait_for(look.score(rollout.trajectory, rollout), timeout=5)


async def test_a_call_that_waits_for_the_preparation_of_another_waits_for_a_resource(engine):
    rollout, begun, go_on = context(engine), asyncio.Event(), asyncio.Event()

    async def prepare(box, asked):
        begun.set()
        await go_on.wait()

    @af.tool(timeout_s=LIMIT_S)
    async def use(context: Context) -> str:
        """Use it."""
        return str((await context.acquire(BoxSpec(), prepare=prepare)).contents)

    first = asyncio.create_task(rollout.acquire(BoxSpec(), prepare=prepare))
    await begun.wait()
    second = asyncio.create_task(call_of(rollout, use))
    await asyncio.sleep(4 * LIMIT_S)
    assert not second.done()
    go_on.set()
    assert await second == "[]"
    await first


async def test_waits_at_the_same_time_count_once_for_the_rollout(engine, busy):
    spec, give_back = busy
    rollout, loop = context(engine, spec=spec), asyncio.get_running_loop()
    began = loop.time()
    calls = [asyncio.create_task(call_of(rollout, tool_that(wait_for_it))) for _ in range(3)]
    await asyncio.sleep(LIMIT_S)
    give_back.set()
    await asyncio.gather(*calls)
    assert 0 < rollout.waited_seconds <= loop.time() - began


async def test_the_timeout_of_an_acquire_holds_for_the_preparation_by_another_call(engine):
    rollout, begun = context(engine), asyncio.Event()

    async def prepare(box, asked):
        begun.set()
        await asyncio.Event().wait()

    first = asyncio.create_task(rollout.acquire(BoxSpec(), prepare=prepare))
    await begun.wait()
    with pytest.raises(AcquireTimeout, match="another call of rollout r0 still prepares it"):
        await asyncio.wait_for(rollout.acquire(BoxSpec(), prepare=prepare, timeout=0.01), timeout=5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_the_timeout_of_an_acquire_holds_for_all_its_requests_together(engine, monkeypatch):
    rollout, begun, fail, timeouts = context(engine), asyncio.Event(), asyncio.Event(), []

    async def prepare(box, asked):
        begun.set()
        await fail.wait()
        raise ValueError("no such file")

    async def acquire(*args, timeout, **kwargs):
        timeouts.append(timeout)
        return await ask(*args, timeout=timeout, **kwargs)

    first = asyncio.create_task(rollout.acquire(BoxSpec(), prepare=prepare))
    await begun.wait()
    ask = engine.acquire
    monkeypatch.setattr(engine, "acquire", acquire)
    second = asyncio.create_task(rollout.acquire(BoxSpec(), prepare=lambda box, asked: None, timeout=60))
    await asyncio.sleep(0.01)
    fail.set()
    with pytest.raises(ResourceStartError):
        await first
    await second
    assert timeouts[0] == 60
    assert timeouts[1] < 60


async def test_waiting_longer_than_allowed_names_the_holder(engine):
    spec = BoxSpec(capacity=1)
    await context(engine, "holder").acquire(spec)
    with pytest.raises(AcquireTimeout, match="holder"):
        await context(engine, "r1").acquire(spec, timeout=0.01)


async def test_prepare_runs_once_before_anybody_gets_the_instance(engine):
    first = context(engine, stock=["eggs"])

    async def prepare(box, asked):
        await asyncio.sleep(0.01)
        box.contents += asked.task["stock"]

    boxes = await asyncio.gather(*(first.acquire(BoxSpec(), prepare=prepare) for _ in range(4)))
    assert all(box.contents == ["eggs"] for box in boxes)


async def test_an_instance_whose_preparation_failed_goes_back_and_the_failure_is_infrastructure(engine):
    first = context(engine)

    def prepare(box, asked):
        box.contents.append("half")
        raise ValueError("no such file")

    spec = BoxSpec(capacity=1)
    with pytest.raises(ResourceStartError, match=r"ValueError: no such file") as caught:
        await first.acquire(spec, prepare=prepare)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not caught.value.by_policy
    assert (await context(engine, "r1").acquire(spec, timeout=5)).contents == []


async def test_a_call_that_waits_for_the_preparation_of_another_that_fails_prepares_an_instance_anew(engine):
    first, begun, fail = context(engine), [], asyncio.Event()

    async def prepare(box, asked):
        begun.append(box.instance)
        if len(begun) == 1:
            await fail.wait()
            raise ValueError("no such file")
        box.contents.append("eggs")

    calls = [asyncio.create_task(first.acquire(BoxSpec(), prepare=prepare)) for _ in range(3)]
    await asyncio.sleep(0.05)
    fail.set()
    error, *boxes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(error, ResourceStartError)
    assert [box.contents for box in boxes] == [["eggs"]] * 2  # type: ignore[union-attr]
    assert len(begun) == 2


async def test_what_is_shared_is_not_prepared_by_one_of_those_who_share_it(engine):
    with pytest.raises(UsageError, match="not prepared by one of them"):
        await context(engine).acquire(BoxSpec(), scope="global", prepare=lambda box, asked: None)
    assert not engine.snapshot().pools


async def test_every_call_prepares_the_instance_it_has_for_itself(engine):
    spec = BoxSpec(capacity=1)
    first = context(engine)
    seen = []
    for _ in range(2):
        async with first.call() as call:
            box = await call.acquire(
                spec, scope="call", timeout=5, prepare=lambda box, asked: box.contents.append("laid")
            )
            seen.append(list(box.contents))
    assert seen == [["laid"], ["laid"]]


async def test_a_cancelled_preparation_leaves_nothing_half_prepared(engine):
    first = context(engine)
    begun = asyncio.Event()

    async def prepare(box, asked):
        box.contents.append("half")
        begun.set()
        await asyncio.sleep(60)

    preparing = asyncio.create_task(first.acquire(BoxSpec(), prepare=prepare))
    await begun.wait()
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert (await first.acquire(BoxSpec(), timeout=5)).contents == []


async def test_a_preparation_may_need_another_prepared_resource(engine):
    first = context(engine)

    async def outer(box, asked):
        inner = await asked.acquire(BoxSpec(colour="blue"), prepare=lambda box, asked: box.contents.append("inner"))
        box.contents += [*inner.contents, "outer"]

    async with asyncio.timeout(5):
        assert (await first.acquire(BoxSpec(), prepare=outer)).contents == ["inner", "outer"]


async def test_a_lease_ends_with_its_block_and_is_of_its_own(engine):
    spec = BoxSpec(capacity=2)
    first = context(engine)
    kept = await first.acquire(spec)
    async with first.lease(spec) as box:
        other = box.instance
        assert other != kept.instance
    async with context(engine, "r1").lease(spec, timeout=5) as again:
        assert again.instance == other


async def test_call_scope_ends_with_the_tool_call(engine):
    spec = BoxSpec(capacity=1)
    first = context(engine)
    async with first.call() as call:
        first_box = (await call.acquire(spec, scope="call")).instance
    async with first.call() as call:
        assert (await call.acquire(spec, scope="call", timeout=5)).instance == first_box


async def test_call_scope_outside_a_call_says_what_to_write_instead(engine):
    with pytest.raises(UsageError, match=r"context\.lease"):
        await context(engine).acquire(BoxSpec(), scope="call")


async def test_a_sync_tool_on_a_thread_waits_for_work_on_the_loop(engine):
    first = context(engine)
    box = await asyncio.to_thread(lambda: first.wait(first.acquire(BoxSpec())))
    assert box is await first.acquire(BoxSpec())


async def test_a_sync_tool_that_takes_a_second_box_of_a_pool_of_one_for_its_call_is_told(engine):
    spec = BoxSpec(capacity=1)

    def tool(call):
        call.wait(call.acquire(spec, scope="call"))
        call.wait(call.acquire(spec, scope="call"))

    async with context(engine).call() as call, asyncio.timeout(10):
        with pytest.raises(DeadlockBroken, match="only it could release"):
            await asyncio.to_thread(tool, call)


async def test_an_async_tool_that_takes_a_second_box_in_a_task_that_it_waits_for_is_told(engine):
    spec = BoxSpec(capacity=1)
    async with context(engine).call() as call, asyncio.timeout(10):
        await asyncio.create_task(call.acquire(spec, scope="call"))
        with pytest.raises(DeadlockBroken):
            await asyncio.create_task(call.acquire(spec, scope="call"))
        with pytest.raises(DeadlockBroken):
            async with call.lease(spec):
                pass


async def test_blocks_inside_one_another_that_wait_for_themselves_are_told(engine):
    first, spec = context(engine), BoxSpec(capacity=1)
    async with asyncio.timeout(10), first.lease(spec):
        with pytest.raises(DeadlockBroken):
            async with first.lease(spec):
                pass
        with pytest.raises(DeadlockBroken):
            await first.acquire(spec)


async def stay_alone(room):
    assert not room.locked()
    async with room:
        await asyncio.sleep(0.01)


async def test_blocks_side_by_side_in_one_call_take_turns_and_are_no_deadlock(engine):
    spec, room = BoxSpec(capacity=1), asyncio.Lock()

    async def branch(call):
        async with call.lease(spec):
            await stay_alone(room)

    async with context(engine).call() as call, asyncio.timeout(10):
        await asyncio.gather(*(branch(call) for _ in range(4)))


async def test_two_calls_side_by_side_take_turns_and_are_no_deadlock(engine):
    first, spec, room = context(engine), BoxSpec(capacity=1), asyncio.Lock()

    async def tool():
        async with first.call() as call:
            await call.acquire(spec, scope="call")
            await stay_alone(room)

    async with asyncio.timeout(10):
        await asyncio.gather(*(tool() for _ in range(4)))


async def test_what_a_tool_kept_of_a_resource_reaches_nothing_once_its_rollout_has_ended(engine):
    spec = BoxSpec(capacity=1)
    first, second = context(engine, "r0"), context(engine, "r1")
    kept = await first.acquire(spec)
    await first.close()
    box = await second.acquire(spec)
    with pytest.raises(LeaseExpired, match=r"by r0.* is over"):
        kept.contents.append("of the first")
    with pytest.raises(LeaseExpired):
        kept.contents = ["of the first"]
    assert box.contents == []


async def test_wait_on_the_loop_itself_is_refused_rather_than_hanging(engine):
    first = context(engine)
    with pytest.raises(UsageError, match="await"):
        first.wait(first.acquire(BoxSpec()))


async def test_a_tool_that_outlives_its_rollout_gets_nothing_more(engine):
    first = context(engine)
    async with first.call() as call:
        await first.close()
        with pytest.raises(ResourceError, match="has ended"):
            await call.acquire(BoxSpec())
        with pytest.raises(ResourceError, match="outlived its call"):
            await asyncio.to_thread(lambda: call.wait(call.acquire(BoxSpec())))


async def test_what_a_sync_tool_waits_for_ends_with_its_call(engine):
    first = context(engine)
    stopped = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    async with first.call() as call:
        outlives = asyncio.create_task(asyncio.to_thread(lambda: call.wait(work())))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await stopped.wait()
    with pytest.raises(asyncio.CancelledError):
        await outlives
    with pytest.raises(ResourceError, match="outlived its call"):
        await asyncio.to_thread(lambda: call.wait(work()))


async def test_what_a_sync_tool_begins_in_the_moment_its_call_ends_ends_too(engine, monkeypatch):
    begin = asyncio.run_coroutine_threadsafe
    ending = context(engine).call()
    call = await ending.__aenter__()

    def begin_too_late(work, loop):
        begin(ending.__aexit__(None, None, None), loop).result()
        return begin(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_too_late)
    tool = asyncio.create_task(asyncio.to_thread(lambda: call.wait(asyncio.Event().wait())))
    await asyncio.wait({tool}, timeout=5)
    assert tool.cancelled()


async def test_a_task_that_outlives_its_call_keeps_nothing_for_it(engine):
    spec = BoxSpec(capacity=1)
    first = context(engine)
    async with context(engine, "r1").lease(spec), first.call() as call:
        outlives = asyncio.create_task(call.acquire(spec, scope="call"))
        await asyncio.sleep(0)
    with pytest.raises(ResourceError, match="outlived its call"):
        await outlives
    with pytest.raises(ResourceError, match="outlived its call"):
        await call.acquire(spec, scope="call")
    await context(engine, "r2").acquire(spec, timeout=5)


async def test_two_runs_that_name_their_rollouts_alike_share_nothing(engine):
    one, other = context(engine, "eval-0.0"), context(engine, "eval-0.0")
    (await one.acquire(BoxSpec())).contents.append("mark")
    assert (await other.acquire(BoxSpec())).contents == []
    await one.close()
    assert (await other.acquire(BoxSpec())).contents == []


async def test_what_was_declared_is_got_together_at_the_first_acquire_of_one_of_it(engine):
    box, tool = BoxSpec(capacity=1), BoxSpec(capacity=1, colour="blue")
    first, second = context(engine, "r0"), context(engine, "r1")
    for one in (first, second):
        one.declare_resources([box, tool])
    await first.acquire(tool)
    assert {pool.instances[0].owners[0][:2] for pool in engine.snapshot().pools} == {"r0"}
    waiting = asyncio.create_task(second.acquire(tool))
    await asyncio.sleep(0)
    await first.acquire(box, timeout=1)
    await first.close()
    await waiting
    assert {pool.instances[0].owners[0][:2] for pool in engine.snapshot().pools} == {"r1"}


async def test_what_was_not_declared_is_got_alone(engine):
    box, other = BoxSpec(capacity=1), BoxSpec(capacity=1, colour="blue")
    first = context(engine)
    first.declare_resources([box])
    await first.acquire(other)
    assert [pool.spec for pool in engine.snapshot().pools] == [repr(other)]


async def test_what_was_declared_for_one_rollout_alone_cannot_be_shared(engine):
    box = BoxSpec()
    first = context(engine)
    first.declare_resources([box])
    with pytest.raises(UsageError, match="what is shared is not declared"):
        await first.acquire(box, scope="global")
    async with first.lease(box) as extra:  # a further one for a block is no contradiction
        assert extra is not await first.acquire(box)
