"""Real simulators with their own programs, as in the examples: Stockfish over UCI, and ScienceWorld's Java."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import psutil
import pytest

import agentfly as af
from agentfly.core.errors import ResourceDied
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.process.cgroups import writable_cgroup_parent
from agentfly.resources.resource import Status

EXAMPLES = Path(__file__).parents[2] / "examples"

needs_stockfish = pytest.mark.skipif(
    shutil.which("stockfish", path=f"{os.environ.get('PATH', '')}:/usr/games") is None,
    reason="There is no Stockfish here. On Debian and Ubuntu: apt install stockfish",
)
needs_java = pytest.mark.skipif(
    shutil.which("java") is None, reason="There is no Java here. On Debian and Ubuntu: apt install default-jre-headless"
)


def example(name: str) -> ModuleType:
    """A program of the examples, as a module that no other process can import."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def programs(name: str) -> list[int]:
    """Programs of that name that this process has started, itself or by others."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def ends(pid: int) -> bool:
    for _ in range(1000):
        if not alive(pid):
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def chess() -> ModuleType:
    pytest.importorskip("chess", reason="pip install chess")
    return example("chess_with_stockfish")


@pytest.fixture(scope="module")
def science() -> ModuleType:
    pytest.importorskip("scienceworld", reason="pip install scienceworld")
    return example("science_world")


@pytest.mark.slow
@needs_stockfish
@pytest.mark.parametrize("runs", [pytest.param("thread", marks=pytest.mark.slow), "process"])
async def test_eight_games_go_on_at_once_each_with_a_stockfish_of_its_own(
    chess: ModuleType, runs: Literal["thread", "process"], tmp_path: Path
) -> None:
    spec = EnvironmentSpec(factory=chess.Endgame, args=(200,), runs=runs, capacity=8)
    async with af.ResourceEngine(ledger=tmp_path / "state") as engine:

        async def game(number: int) -> list[str]:
            lease = await engine.acquire(spec, f"rollout-{number}")
            opening = ("e2e4", "d2d4", "c2c4", "g1f3")[number % 4]
            for move in (opening, "a2a3"):
                with pytest.raises(ValueError, match="illegal uci"):
                    await lease.resource.play("a1a8")
                assert "Stockfish plays" in await lease.resource.play(move)
            return await lease.resource.moves()

        games = await asyncio.gather(*(game(number) for number in range(8)))
        assert all(len(moves) == 4 for moves in games)
        assert {moves[0] for moves in games} == {"e2e4", "d2d4", "c2c4", "g1f3"}
        engines = programs("stockfish")
        assert len(engines) == 8
    assert not any(alive(pid) for pid in engines)


@pytest.mark.slow
@needs_stockfish
@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_a_stockfish_that_dies_is_no_fault_of_the_agent(
    chess: ModuleType, runs: Literal["thread", "process"]
) -> None:
    spec = EnvironmentSpec(factory=chess.Endgame, args=(200,), runs=runs, capacity=1)
    game = Environment(spec, "game-1")
    await game.start()
    (engine,) = programs("stockfish")
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(ResourceDied, match="Stockfish has ended"):
        await game.play("e2e4")
    assert await game.status() is Status.BROKEN
    await game.release()


@pytest.mark.slow
@needs_stockfish
async def test_a_game_is_kept_over_the_turns_of_a_rollout(chess: ModuleType) -> None:
    tasks = [af.Task(f"The position is {position}.", {"position": position}) for position in chess.ENDGAMES]
    policy = af.ScriptedPolicy(chess.know)
    result = await af.run(chess.AGENT, tasks, reward=chess.mated, attempts=4, policy=policy)
    assert [trajectory.reward for trajectory in result.trajectories] == [1.0] * 8
    assert {len(trajectory.turns) for trajectory in result.trajectories} == {2}
    assert programs("stockfish") == []


async def solve(laboratory: Any, task: str) -> float:
    """Begin a task and do what solves it; the score."""
    await laboratory.reset(task)
    seen = [await laboratory.step(action) for action in await laboratory.solution()]
    assert seen[-1]["over"]
    return round(sum(each["gain"] for each in seen), 6)


@needs_java
@pytest.mark.slow
async def test_three_laboratories_give_right_scores_side_by_side_and_leave_no_java(
    science: ModuleType, tmp_path: Path
) -> None:
    async with af.ResourceEngine(ledger=tmp_path / "state") as engine:
        laboratories = [(await engine.acquire(science.LABORATORY, f"rollout-{n}")).resource for n in range(3)]
        machines = programs("java")
        assert len(machines) == 3
        with pytest.raises(RuntimeError, match="No task was started"):
            await laboratories[0].step("look around")
        tasks = ("find-non-living-thing", "lifespan-shortest-lived", "find-animal")
        assert await asyncio.gather(*map(solve, laboratories, tasks)) == [1.0] * 3
        texts = await asyncio.gather(*(laboratory.reset(tasks[0], 1) for laboratory in laboratories))
        looks = await asyncio.gather(*(laboratory.step("look around") for laboratory in laboratories))
        assert len(set(texts)) == len({look["observation"] for look in looks}) == 1, "a task begins alike everywhere"
        assert not (await laboratories[0].step("fly to the moon"))["valid"]
        assert programs("java") == machines, "a task is loaded, and no virtual machine is started for it"
        for pid in machines:
            assert psutil.Process(pid).memory_full_info().uss < 700 * 2**20
    assert not any(alive(pid) for pid in machines)


@needs_java
@pytest.mark.slow
async def test_a_virtual_machine_that_takes_too_much_is_gone_and_that_is_said(science: ModuleType) -> None:
    if await asyncio.to_thread(writable_cgroup_parent) is None:
        pytest.skip("Java does not start under a limit for each process. Run as root, or where a group is delegated.")
    spec = EnvironmentSpec(factory=science.Laboratory, runs="process", memory="64MiB")
    laboratory = Environment(spec, "laboratory-1")
    await laboratory.start()
    with pytest.raises(ResourceDied, match="ran out of its limit of 64MiB"):
        await laboratory.reset("boil")
    assert await laboratory.status() is Status.BROKEN
    await laboratory.release()
    assert programs("java") == []


@needs_java
@pytest.mark.slow
async def test_no_java_outlives_a_run_that_was_killed(science: ModuleType, tmp_path: Path) -> None:
    program, _, _ = (EXAMPLES / "science_world.py").read_text().partition("if __name__")
    (tmp_path / "owner.py").write_text(
        program
        + "async def hold():\n"
        + "    async with af.ResourceEngine() as engine:\n"
        + "        await engine.acquire(LABORATORY, 'rollout')\n"
        + "        print('started', flush=True)\n"
        + "        await asyncio.sleep(300)\n"
        + "asyncio.run(hold())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tmp_path / "owner.py"),
        stdout=subprocess.PIPE,
        env={**os.environ, "AGENTFLY_STATE_DIR": str(tmp_path / "state")},
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"started\n"
    below = [process.pid for process in psutil.Process(owner.pid).children(recursive=True)]
    assert len(programs("java")) == 1
    owner.kill()
    await owner.wait()
    assert all([await ends(pid) for pid in below])
