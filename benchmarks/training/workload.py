"""TrainingWorkload: the work of both sides of ``python -m benchmarks.training``, and the result of a side."""

from __future__ import annotations

import random
import zlib
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingWorkload:
    """Training steps of known size: each rolls out all prompts, scores the rollouts, and makes one update.

    Attributes:
        tasks: number of prompts; every step has all of them.
        attempts: rollouts of each prompt in a step: the size of a group.
        words: words of the user's message in a prompt.
        sampled: tokens of each generation, no fewer and no more.
        turns: generations of each rollout; every one but the last is answered by a tool.
        warmup, steps: steps that are not counted, and steps that are.
        dtype: number format of the weights and of what is computed with them.
        gradient_checkpointing: whether activations are recomputed instead of stored.
        learning_rate: learning rate of AdamW, constant.
    """

    tasks: int = 2
    attempts: int = 4
    words: int = 96
    sampled: int = 32
    turns: int = 1
    warmup: int = 1
    steps: int = 2
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    learning_rate: float = 1e-6
    seed: int = 0

    def prompts(self) -> list[str]:
        """The users' messages, always the same."""
        chance = random.Random(self.seed)
        return [" ".join(chance.choices(_WORDS, k=self.words)) for _ in range(self.tasks)]

    def specification(self, model: str, threads: int) -> dict[str, Any]:
        """Return the input of a side as a JSON value: fields, prompts, model directory and number of threads."""
        return {**asdict(self), "prompts": self.prompts(), "model": model, "threads": threads}


@dataclass(frozen=True)
class SideResult:
    """The measurements of one side, made in its own process.

    Attributes:
        step_seconds, step_cpu_seconds: time of each counted step by the clock, and processor time of all its threads.
        sampled_tokens: sampled tokens that each of these steps trained on.
        tokens: those and the tokens of their prompts, once for each rollout.
        peak_mib: maximum resident memory of the process.
        versions: versions of its packages.
    """

    step_seconds: list[float]
    step_cpu_seconds: list[float]
    sampled_tokens: list[int]
    tokens: list[int]
    peak_mib: float
    versions: dict[str, str]

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens a second of whole steps."""
        return sum(self.sampled_tokens) / sum(self.step_seconds)

    @property
    def tokens_per_cpu_second(self) -> float:
        """Sampled tokens for each second of processor time."""
        return sum(self.sampled_tokens) / sum(self.step_cpu_seconds)


def score_of(text: str) -> float:
    """A reward of a text that is different for nearly all: from 0 to 0.999."""
    return zlib.crc32(text.encode()) % 1000 / 1000


_WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "sailors", "count"),
    *("their", "coins", "and", "rain", "falls", "on", "old", "stone", "roofs", "before", "morning", "comes"),
]
