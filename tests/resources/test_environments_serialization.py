"""Serialization of an environment's calls, resets and release, whether they are awaited or not."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from agentfly.core.errors import ResourceDied, ResourceError
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.resource import Status

Runs = Literal["loop", "thread", "process"]
everywhere = pytest.mark.parametrize("runs", ["loop", "thread", "process"])
apart = pytest.mark.parametrize("runs", ["thread", "process"])

BLOCKED_S = 1.2
"""How long simulators block where the loop must go on; a stall of a third of it is more than a busy machine makes."""


class Diary:
    """A simulator without a reset, which writes down in a file what happens to it."""

    def __init__(self, path: str, pause: float = 0.0) -> None:
        self.path = path
        self.pause = pause
        time.sleep(pause)
        self.steps = 0
        self.write("made")

    def step(self) -> int:
        self.write("step")
        self.steps += 1
        return self.steps

    def slow_step(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.step()

    async def slow_step_async(self, seconds: float) -> int:
        self.write("begun")
        await asyncio.sleep(seconds)
        return self.step()

    def close(self) -> None:
        time.sleep(self.pause)
        self.write("closed")

    def write(self, line: str) -> None:
        with open(self.path, "a") as file:  # noqa: PTH123  (kept to what the simulator's process has loaded)
            file.write(line + "\n")


class Resetting(Diary):
    """One with a reset."""

    def reset(self) -> None:
        time.sleep(self.pause)
        self.steps = 0


class MadeOnce(Diary):
    """One that cannot be made a second time."""

    def __init__(self, path: str) -> None:
        if Path(path).exists():
            raise OSError("the game's files are gone")
        super().__init__(path)


class HangsAtTheEnd(Diary):
    def close(self) -> None:
        time.sleep(5)


class Deaf:
    """Takes no notice of being cancelled."""

    async def step(self, until: asyncio.Event) -> str:
        while not until.is_set():
            try:
                await until.wait()
            except asyncio.CancelledError:
                continue
        return "at last"


class Gate:
    """Waits on its thread until it is opened."""

    opened = threading.Event()

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def wait(self) -> None:
        self.opened.wait()

    def close(self) -> None:
        self.path.write_text("closed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def environment(factory: Any, *args: Any, **fields: Any) -> Environment:
    return Environment(EnvironmentSpec(factory=factory, args=args, **fields), "environment-under-test")


def lines(path: Path) -> list[str]:
    return path.read_text().split()


@pytest.mark.slow
@apart
async def test_a_cancelled_call_runs_to_its_end_and_the_next_waits_for_it(runs: Runs, path: Path) -> None:
    diary = environment(Resetting, str(path), runs=runs)
    await diary.start()
    for next_one, expected in ((diary.step, 2), (diary.reset, None)):
        call = asyncio.create_task(diary.slow_step(0.3))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await next_one() == expected
    assert await diary.step() == 1
    assert await diary.status() is Status.HEALTHY
    await diary.release()


@apart
async def test_calls_that_overlap_are_made_one_at_a_time_in_order(runs: Runs, path: Path) -> None:
    diary = environment(Resetting, str(path), runs=runs)
    await diary.start()
    results = await asyncio.gather(diary.slow_step(0.05), *(diary.step() for _ in range(20)))
    assert results == list(range(1, 22))
    await diary.release()


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("factory", [Diary, Resetting])
async def test_resets_take_their_turn_among_calls(runs: Runs, factory: Any, path: Path) -> None:
    diary = environment(factory, str(path), 0.02, runs=runs)
    await diary.start()
    results = await asyncio.gather(
        diary.step(),
        diary.step(),
        diary.reset(),
        diary.step(),
        diary.reset(),
        diary.reset(),
        diary.step(),
        diary.step(),
    )
    assert results == [1, 2, None, 1, None, None, 1, 2]
    await diary.release()


async def test_a_reset_in_the_loop_waits_for_calls_that_overlap_and_holds_up_those_after_it(path: Path) -> None:
    diary = environment(Diary, str(path))
    await diary.start()
    results = await asyncio.gather(
        diary.slow_step_async(0.1), diary.slow_step_async(0.05), diary.reset(), diary.slow_step_async(0.01)
    )
    assert results == [2, 1, None, 1]  # type: ignore[comparison-overlap]
    assert lines(path) == ["made", "begun", "begun", "step", "step", "closed", "made", "begun", "step"]
    await diary.release()


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("factory", [Diary, Resetting])
async def test_an_environment_that_resets_itself_is_healthy_all_the_while(runs: Runs, factory: Any, path: Path) -> None:
    diary = environment(factory, str(path), 0.1, runs=runs)
    await diary.start()
    resetting = asyncio.create_task(diary.reset())
    seen = []
    while not resetting.done():
        seen.append(await diary.status())
        await asyncio.sleep(0.001)
    await resetting
    assert set(seen) == {Status.HEALTHY}
    assert await diary.status() is Status.HEALTHY
    await diary.release()


@pytest.mark.slow
@apart
async def test_a_making_anew_that_nobody_waits_for_goes_on_and_the_next_call_meets_the_new(
    runs: Runs, path: Path
) -> None:
    diary = environment(Diary, str(path), 0.2, runs=runs)
    await diary.start()
    await diary.step()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(diary.reset(), 0.05)
    assert await diary.step() == 1
    await diary.release()


@everywhere
async def test_what_could_not_be_made_anew_is_never_given_to_anybody(runs: Runs, path: Path) -> None:
    once = environment(MadeOnce, str(path), runs=runs)
    await once.start()
    with pytest.raises(OSError, match="files are gone"):
        await once.reset()
    assert await once.status() is Status.BROKEN
    with pytest.raises(ResourceDied, match="creating it again failed with OSError"):
        await once.step()
    await once.release()


@pytest.mark.slow
@apart
async def test_a_making_anew_has_the_time_of_a_start(runs: Runs, path: Path) -> None:
    diary = environment(SlowAfterTheFirst, str(path), runs=runs, start_timeout_s=0.3)
    await diary.start()
    with pytest.raises(ResourceDied, match=r"it was not created again within start_timeout_s=0.3"):
        await diary.reset()
    assert await diary.status() is Status.BROKEN
    await diary.release()


class SlowAfterTheFirst:
    def __init__(self, path: str) -> None:
        if Path(path).exists():
            time.sleep(1.0)
        Path(path).write_text("made")


@pytest.mark.slow
@apart
async def test_a_call_beyond_its_deadline_loses_the_instance_and_is_told(runs: Runs, path: Path) -> None:
    diary = environment(Diary, str(path), runs=runs, call_timeout_s=0.2)
    await diary.start()
    with pytest.raises(ResourceDied, match=r"slow_step\(\) did not end within call_timeout_s=0.2"):
        await diary.slow_step(1.0)
    assert await diary.status() is Status.BROKEN
    with pytest.raises(ResourceDied, match="cannot be used"):
        await diary.step()
    await diary.release()


@pytest.mark.slow
async def test_a_hanging_process_is_gone_when_its_release_returns(path: Path) -> None:
    for factory, call in ((HangsAtTheEnd, None), (Diary, "slow_step")):
        diary = environment(factory, str(path), runs="process", release_timeout_s=0.2)
        await diary.start()
        if call is not None:
            waiting = asyncio.create_task(diary.call(call, 60.0))
            await asyncio.sleep(0.05)
            waiting.cancel()
        await diary.release()
        assert await diary.status() is Status.BROKEN
        assert diary.traces == {}


@pytest.mark.slow
async def test_a_hanging_thread_is_not_said_to_be_gone_until_it_is(path: Path) -> None:
    Gate.opened.clear()
    gate = environment(Gate, str(path), runs="thread", call_timeout_s=0.1, release_timeout_s=0.2)
    await gate.start()
    with pytest.raises(ResourceDied, match=r"wait\(\) did not end"):
        await gate.wait()
    for _ in range(2):
        with pytest.raises(ResourceError, match=r'does not end: a call hangs in it.*runs="process"'):
            await gate.release()
    Gate.opened.set()
    await gate.release()
    assert "environment-under-test" not in {thread.name for thread in threading.enumerate()}
    assert lines(path) == ["closed"]


async def test_a_call_in_the_loop_that_ignores_its_cancellation_is_not_said_to_be_gone_until_it_is() -> None:
    deaf, end = environment(Deaf, release_timeout_s=0.4), asyncio.Event()
    await deaf.start()
    call = asyncio.create_task(deaf.step(end))
    await asyncio.sleep(0.01)
    with pytest.raises(ResourceError, match=r"environment-under-test\.step ignores its cancellation"):
        await deaf.release()
    end.set()
    assert await call == "at last"
    await deaf.release()


@pytest.mark.slow
@apart
async def test_who_waits_for_a_call_learns_of_the_release_and_is_not_cancelled(runs: Runs, path: Path) -> None:
    diary = environment(Diary, str(path), runs=runs, release_timeout_s=2.0)
    await diary.start()
    calls = [asyncio.create_task(diary.slow_step(1.0)), asyncio.create_task(diary.step())]
    await asyncio.sleep(0.05)
    await diary.release()
    for call, told in zip(calls, (r"slow_step\(\)", r"step\(\)"), strict=True):
        with pytest.raises(ResourceDied, match=f"was released during {told}"):
            await call


@pytest.mark.slow
@apart
async def test_blocking_simulators_do_not_hold_up_the_loop(runs: Runs, path: Path) -> None:
    stepping = environment(Diary, str(path), runs=runs)
    resetting = environment(PausesAfterItsStart, "reset", runs=runs)
    closing = environment(PausesAfterItsStart, "close", runs=runs)
    await asyncio.gather(stepping.start(), resetting.start(), closing.start())
    largest_gap = 0.0

    async def beat() -> None:
        nonlocal largest_gap
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            last, before = time.monotonic(), last
            largest_gap = max(largest_gap, last - before)

    heart = asyncio.create_task(beat())
    await asyncio.sleep(0.05)
    await asyncio.gather(stepping.slow_step(BLOCKED_S), resetting.reset(), closing.release())
    await asyncio.sleep(0.05)
    heart.cancel()
    assert 0 < largest_gap < BLOCKED_S, "the loop stood still while the simulators slept"
    await asyncio.gather(stepping.release(), resetting.release())


class PausesAfterItsStart:
    """Blocks in one of its methods, but not in the reset of its start."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1
        if self.where == "reset" and self.resets > 1:
            time.sleep(BLOCKED_S)

    def close(self) -> None:
        if self.where == "close":
            time.sleep(BLOCKED_S)
