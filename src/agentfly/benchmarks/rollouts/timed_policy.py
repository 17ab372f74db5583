"""TimedPolicy: a policy whose texts and durations follow the plans of a workload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from agentfly.benchmarks.rollouts.workload import RolloutPlan
from agentfly.core.messages import Message, PlacedImage
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.policies.scripted import ByteTokenizer

TOOLS = {False: "work", True: "toil"}
"""The names of the workloads' tools, by whether they are sync functions."""


class MeteredTokenizer(ByteTokenizer):
    """The tokenizer of scripted policies, with a measurement of its processor time.

    Its calls are recorded and repeated when the time is read, because reading a clock at each call would take longer
    than many calls. Where possible, texts are recorded, because they cost the garbage collector nothing.
    """

    def __init__(self) -> None:
        self._notes: _RecordedCalls | None = None

    def start_recording(self) -> None:
        """Start to record calls."""
        self._notes = _RecordedCalls()

    def cpu_seconds(self) -> float:
        """Return the processor time of the calls since `note`."""
        notes, self._notes = self._notes or _RecordedCalls(), None
        decoded = [super(MeteredTokenizer, self).encode_text(text) for text in notes.decoded]
        began = time.thread_time()
        for text in notes.encoded:
            super().encode_text(text)
        for ids in decoded:
            super().decode(ids)
        for messages, opens, tools in notes.rendered:
            super().apply_chat_template(messages, add_generation_prompt=opens, tools=tools)
        return time.thread_time() - began

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text."""
        if self._notes is not None:
            self._notes.encoded.append(text)
        return super().encode_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        text = super().decode(ids)
        if self._notes is not None:
            self._notes.decoded.append(text)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as text."""
        if self._notes is not None:
            self._notes.rendered.append((messages, add_generation_prompt, tools))
        return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tools=tools)


@dataclass(slots=True)
class _RecordedCalls:
    """The calls of a tokenizer."""

    encoded: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)
    rendered: list[tuple[Sequence[Message], bool, Sequence[Mapping[str, Any]]]] = field(default_factory=list)


class TimedPolicy:
    """A policy whose generations have planned texts and durations.

    Args:
        plans: the planned rollouts. A group's id ends with the index of its plan.

    Attributes:
        calls: number of generations.
        held_turn: number of the turn whose generations wait for ``hold`` to be set; None if none does.
        hold: lets these generations continue.
    """

    context_length = 1_000_000
    version = 0

    def __init__(self, plans: Sequence[RolloutPlan]) -> None:
        self.tokenizer = MeteredTokenizer()
        self.calls = 0
        self.hold = asyncio.Event()
        self.held_turn: int | None = None
        self._plans = plans
        self._turns: dict[str, int] = {}
        self._texts = {
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
        """Return the plan's next turn after its planned time."""
        self.calls += 1
        turn = self._turns.get(rollout_id, 0)
        self._turns[rollout_id] = turn + 1
        plan = self._plans[int(rollout_id.rpartition("-")[2].partition(".")[0])]
        await asyncio.sleep(plan.generations[turn])
        if turn == self.held_turn:
            await self.hold.wait()
        ids = self._texts[plan.sync[turn]][turn] if turn < len(plan.tools) else self._last
        return Generation(ids, [0.0] * len(ids), "stop", self.version)

    def release_rollout(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self._turns.pop(rollout_id, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.clear()

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode_text(text), *self.tokenizer.eos_ids]


_MOST_TURNS = 32
