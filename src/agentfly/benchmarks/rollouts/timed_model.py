"""TimedModel: a policy that says what a workload's plans want it to say, in the time that they give it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.benchmarks.rollouts.workload import Plan
from agentfly.images import PlacedImage
from agentfly.messages import Message
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.policies.scripted import ByteTokenizer

TOOLS = {False: "work", True: "toil"}
"""The names of the workloads' tools, by whether they are sync functions."""


class MeteredTokenizer(ByteTokenizer):
    """The tokenizer of scripted policies, of which can be told how much processor time it took.

    What it is asked for is noted, and done once more when the time is asked for: a clock read at each call would take
    longer than many a call.
    """

    def __init__(self) -> None:
        self._asked: list[Callable[[], object]] | None = None

    def note(self) -> None:
        """Begin to note what is asked for."""
        self._asked = []

    def cpu_seconds(self) -> float:
        """Processor time of what was asked for since `note`."""
        asked, self._asked = self._asked or [], None
        began = time.thread_time()
        for work in asked:
            work()
        return time.thread_time() - began

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text."""
        if self._asked is not None:
            self._asked.append(partial(super().encode_text, text))
        return super().encode_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        if self._asked is not None:
            self._asked.append(partial(super().decode, ids))
        return super().decode(ids)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as text."""
        work = partial(super().render, messages, add_generation_prompt=add_generation_prompt, tools=tools)
        if self._asked is not None:
            self._asked.append(work)
        return work()


class TimedModel:
    """A policy whose generations are planned.

    Args:
        plans: the rollouts; one's number is the last part of its group's name.

    Attributes:
        calls: how many generations were made.
        hold: set while generations go on; while it is not, those that begin wait.
    """

    context_length = 1_000_000
    version = 0

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.tokenizer = MeteredTokenizer()
        self.calls = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self._plans = plans
        self._turns: dict[str, int] = {}
        self._said = {
            sync: [self._ids(HermesFormat().write(name, {"turn": turn})) for turn in range(_MOST_TURNS)]
            for sync, name in TOOLS.items()
        }
        self._last = self._ids("finished")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """The plan's next turn, after the time that it takes."""
        self.calls += 1
        turn = self._turns.get(rollout_id, 0)
        self._turns[rollout_id] = turn + 1
        plan = self._plans[int(rollout_id.rpartition("-")[2].partition(".")[0])]
        await asyncio.sleep(plan.generations[turn])
        await self.hold.wait()
        ids = self._said[plan.sync[turn]][turn] if turn < len(plan.tools) else self._last
        return Generation(ids, [0.0] * len(ids), "stop", self.version)

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self._turns.pop(rollout_id, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.clear()

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode_text(text), self.tokenizer.eos_id]


_MOST_TURNS = 32
