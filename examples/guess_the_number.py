"""Guess the number: a game as an environment, a tool that plays it, and a policy that halves the range.

    python examples/guess_the_number.py

It needs no model: the policy is scripted. Without the argument ``policy`` of `af.run`, the agent's model plays.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import agentfly as af

HIGHEST = 100
ENOUGH_GUESSES = 7  # halving 100 numbers needs no more


class GuessTheNumber:
    """The game. It does not depend on AgentFly: any object with methods can be an environment."""

    def __init__(self, highest: int) -> None:
        self.highest = highest

    def reset(self, seed: int = 0) -> None:
        self.secret = random.Random(seed).randint(1, self.highest)
        self.guesses: list[int] = []

    def step(self, number: int) -> str:
        self.guesses.append(number)
        if number == self.secret:
            return "correct"
        return "too low" if number < self.secret else "too high"

    def score(self) -> float:
        if self.secret not in self.guesses:
            return 0.0
        return min(1.0, ENOUGH_GUESSES / len(self.guesses))


# At most four games at a time; a fifth rollout waits for one without holding up the others.
GAME = af.EnvironmentSpec(factory=GuessTheNumber, args=(HIGHEST,), capacity=4)


async def deal(game: Any, context: af.Context) -> None:
    """Called once a rollout, before its first guess: attempts at one task guess the same number."""
    await game.reset(seed=context.task["seed"])


@af.tool
async def guess(number: int, context: af.Context) -> af.ToolResult:
    """Guess the secret number.

    Args:
        number: a whole number from 1 to 100.
    """
    game = await context.acquire(GAME, prepare=deal)  # the same game in every turn of this rollout
    answer = await game.step(number)
    return af.ToolResult(answer, done=answer == "correct")


@af.reward
async def few_guesses(context: af.Context) -> float:
    """1 for at most seven guesses, less for more, 0 for a number that was not found."""
    game = await context.acquire(GAME, prepare=deal)  # still as the tool left it
    return float(await game.score())


AGENT = af.Agent(
    model="tiny",
    tools=[guess],
    system_prompt=f"I am thinking of a whole number from 1 to {HIGHEST}. Find it in as few guesses as you can.",
    max_turns=12,
)


def halve(conversation: str, turn: int) -> str:
    """The scripted policy: what a perfect player writes, given the conversation so far."""
    low, high = 1, HIGHEST
    for number, answer in re.findall(r'"number": (\d+).*?(too low|too high)', conversation, re.DOTALL):
        if answer == "too low":
            low = int(number) + 1
        else:
            high = int(number) - 1
    middle = (low + high) // 2
    return f"It lies between {low} and {high}.\n" + AGENT.format.write("guess", {"number": middle})


async def main() -> None:
    tasks = [af.Task("Begin.", {"seed": seed}) for seed in range(8)]
    result = await af.run(AGENT, tasks, reward=few_guesses, policy=af.ScriptedPolicy(halve))
    for trajectory in result.trajectories:
        calls = [result.call for turn in trajectory.turns for result in turn.tool_results]
        numbers = [call.arguments["number"] for call in calls if call.arguments is not None]
        print(f"seed {trajectory.task['seed']}: {numbers} -> {trajectory.reward}")
    print(f"mean reward {result.metrics['reward/mean']:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
