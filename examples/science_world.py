"""ScienceWorld: experiments in a simulated laboratory, in one Java virtual machine each.

    python examples/science_world.py

It needs Java (`apt install default-jre-headless`) and the package `scienceworld` (`pip install scienceworld`), and no
model: the policy plays the solutions of the simulator. Without the argument ``policy`` of `af.run`, the agent's model
plays.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from typing import Any

import scienceworld.scienceworld as simulator

import agentfly as af
from agentfly.core.errors import PrerequisiteError

INVALID = "No known action matches that input."


class Laboratory:
    """One simulator in one virtual machine. Two simulators in one virtual machine give wrong scores."""

    def __init__(self, heap: str = "400m") -> None:
        if shutil.which("java") is None:
            raise PrerequisiteError(
                "There is no Java on this machine. On Debian and Ubuntu: apt install default-jre-headless"
            )
        # The package starts Java with its defaults, by which each takes a gigabyte; it has no argument for that. What
        # is changed here is changed in this simulator's process alone.
        options = [f"-Xmx{heap}", "-Xss8m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        # The order in which it lists what is in a room depends on hash codes that Java draws anew as it goes. Without
        # these, attempts at one task would not begin alike.
        options += ["-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
        simulator.launch_gateway = functools.partial(simulator.launch_gateway, javaopts=options)
        self.world = simulator.ScienceWorldEnv()

    def reset(self, task: str = "", variation: int = 0, simplifications: str = "easy") -> str:
        """Start a task and return its description. Without a task, do nothing."""
        self.task = task, variation, simplifications
        self.score = 0.0
        if not task:
            return ""
        self.world.load(task, variation, simplifications)
        return str(self.world.get_task_description())

    def step(self, action: str) -> dict[str, Any]:
        """Act, and return the observation, the earned score (1 is the maximum; below 0 is a failure), and more."""
        if not self.task[0]:
            raise RuntimeError("No task was started.")
        # `ScienceWorldEnv.step` also lists every action that is possible, which takes ten times as long.
        server = self.world.server
        observation, before, self.score = str(server.step(action)), self.score, float(server.getScore())
        over = bool(server.getCompleted()) or self.score < 0
        return {"observation": observation, "gain": self.score - before, "over": over, "valid": observation != INVALID}

    def solution(self) -> list[str]:
        """Return actions that lead to the full score. This restarts the task."""
        task, variation, simplifications = self.task
        self.world.load(task, variation, simplifications, generateGoldPath=True)
        solution = self.world.get_gold_action_sequence()
        self.world.load(task, variation, simplifications)
        return list(solution)

    def close(self) -> None:
        self.world.close()


LABORATORY = af.EnvironmentSpec(
    factory=Laboratory,
    runs="process",
    reuse="reset",  # loading another task is enough, and a virtual machine takes seconds to start
    capacity=3,
    memory="768MiB",
    start_timeout_s=120,
    reset_timeout_s=60,
)


async def set_up(laboratory: Any, context: af.Context) -> None:
    await laboratory.reset(context.task["name"], context.task["variation"])


@af.tool
async def act(action: str, context: af.Context) -> af.ToolResult:
    """Do something in the laboratory.

    Args:
        action: what to do, such as "open door to kitchen".
    """
    laboratory = await context.acquire(LABORATORY, prepare=set_up)  # the same in every turn of this rollout
    seen = await laboratory.step(action)
    return af.ToolResult(seen["observation"], reward=seen["gain"], done=seen["over"], info={"valid": seen["valid"]})


@af.reward
def score(trajectory: af.Trajectory) -> float:
    """The score that all actions have earned; 0 after a failure."""
    gains = [call.reward for turn in trajectory.turns for call in turn.tool_results if call.reward is not None]
    return max(0.0, round(sum(gains), 6))


AGENT = af.Agent(model="tiny", tools=[act], system_prompt="You work in a laboratory.", max_turns=50)

EXPERIMENTS = [("find-non-living-thing", 0), ("find-animal", 0), ("lifespan-shortest-lived", 0)]


async def solve(experiments: list[tuple[str, int]]) -> dict[str, tuple[af.Task, list[str]]]:
    """Return each task with its solution, by the text of the task."""
    solved = {}
    async with af.ResourceEngine() as engine:

        async def solve_one(name: str, variation: int) -> None:
            lease = await engine.acquire(LABORATORY, f"solution of {name} {variation}")
            text = await lease.resource.reset(name, variation)
            task = af.Task(text, {"name": name, "variation": variation})
            solved[text] = task, await lease.resource.solution()

        await asyncio.gather(*(solve_one(*experiment) for experiment in experiments))
    return solved


async def main() -> None:
    solved = await solve(EXPERIMENTS)

    def know(conversation: str, turn: int) -> str:
        """The scripted policy: what a perfect scientist writes."""
        solution = next(actions for text, (_, actions) in solved.items() if text in conversation)
        return AGENT.format.write("act", {"action": solution[turn]})

    tasks = [task for task, _ in solved.values()]
    result = await af.run(AGENT, tasks, reward=score, policy=af.ScriptedPolicy(know))
    for trajectory in sorted(result.trajectories, key=lambda each: str(each.task["name"])):
        print(f"{trajectory.task['name']}: {len(trajectory.turns)} turns -> {trajectory.reward}")
    print(f"mean reward {result.metrics['reward/mean']:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
