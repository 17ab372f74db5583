"""A judge as the reward: one model grades what another wrote, and all rollouts share it.

    python examples/judge_reward.py

Both models are scripted here, so it runs anywhere and always prints the same.
"""

from __future__ import annotations

import asyncio
import re

import agentfly as af
from agentfly.policies.policy import SamplingParams

QUESTIONS = [
    {"prompt": "Why is the sky blue?", "key": "scatter"},
    {"prompt": "Why does ice float?", "key": "dense"},
    {"prompt": "Why do we see lightning before we hear thunder?", "key": "faster"},
    {"prompt": "What is the best colour?", "key": "blue"},
]

ANSWERS = {
    "sky": "Because air molecules scatter blue light more than red light.",
    "ice": "It just does.",
    "lightning": "Light is faster than sound.",
    "colour": "Blue, obviously.",
}


def answer(conversation: str, turn: int) -> str:
    """The model whose responses are graded."""
    return next(text for word, text in ANSWERS.items() if word in conversation)


def grade(prompt: str, turn: int) -> str:
    """The model that grades. Like a real one, it does not always follow its instructions."""
    if "best colour" in prompt:
        return "That is a matter of taste."
    expected, given = re.findall(r"(?:Expected|Answer): (.*)", prompt)
    return f"Score: {(expected in given) * 6 + ('ecause' in given) * 4}/10"


class Judge:
    """Asks the grading model, and reads its score."""

    def __init__(self) -> None:
        self.model = af.ScriptedPolicy(grade, seconds=0.05)
        self.asked = 0

    async def score(self, question: str, expected: str, response: str) -> float:
        self.asked += 1
        prompt = f"Question: {question}\nExpected: {expected}\nAnswer: {response}\nEnd with 'Score: N/10'."
        ids = self.model.tokenizer.encode_text(prompt)
        generation = await self.model.generate(ids, SamplingParams(), rollout_id=f"judge-{self.asked}")
        verdict = self.model.tokenizer.decode(generation.ids).removesuffix("<|im_end|>")
        found = re.search(r"Score: (\d+)/10", verdict)
        if found is None:
            raise ValueError(f"the judge gave no score: {verdict!r}")
        return int(found[1]) / 10


# Shared: one judge for all rollouts, and at most two of them at it at a time.
JUDGE = af.EnvironmentSpec(factory=Judge, capacity=1, max_concurrency=2)


@af.reward
async def judged(prompt: str, response: str, key: str, context: af.Context) -> float:
    """The judge's score, from 0 to 1. Without a valid score, the rollout is unscored, never scored 0."""
    judge = await context.acquire(JUDGE, scope="global")
    return float(await judge.score(prompt, key, response))


AGENT = af.Agent(model="tiny", system_prompt="Explain in one sentence.")


async def main() -> None:
    result = await af.run(AGENT, QUESTIONS, reward=judged, policy=af.ScriptedPolicy(answer))
    for trajectory in result.trajectories:
        score = "unscored" if trajectory.reward is None else trajectory.reward
        print(f"{trajectory.task.prompt} {trajectory.response} -> {score}")
        if trajectory.reward_failure is not None:
            print(f"    {trajectory.reward_failure.message}")
    print(f"mean reward {result.metrics['reward/mean']:.2f}, unscored {result.metrics['unscored']:.0f}")


if __name__ == "__main__":
    asyncio.run(main())
