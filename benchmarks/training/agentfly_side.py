"""AgentFly's side of ``python -m benchmarks.training``, as a program: a `Trainer` with the embedded policy.

It takes a `TrainingWorkload` as JSON and prints a `SideResult` as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.core import signals
from agentfly.core.events import Event, EventStream, StepFinished, TrainingStarted
from agentfly.core.messages import PlacedImage, ToolCall
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.formats.toolcalls.tool_call_format import ToolDescription
from agentfly.policies.embedded.policy import EmbeddedPolicy
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.trainer import Trainer
from benchmarks.training.trl_side import peak_mib
from benchmarks.training.workload import SideResult, score_of

_ALL_AT_ONCE = 2**30
"""So many tokens may be scored at a time, as trl does with a device's batch."""


class FixedLengthPolicy(EmbeddedPolicy):
    """A policy whose generations always have the maximum length and still count as complete turns."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample without an end of turn, as trl does until ``min_new_tokens``."""
        endless = replace(sampling, stop_ids=(), suppressed_ids=sampling.stop_ids)
        generation = await super().generate(prompt_ids, endless, rollout_id=rollout_id, images=images)
        return replace(generation, finish_reason="stop")


@dataclass(frozen=True)
class EveryTurnCalls(HermesFormat):
    """A format that reads every turn as a call of the first tool, whatever its text."""

    def parse(self, text: str, tools: Sequence[ToolDescription], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """The one call."""
        return (ToolCall(f"call_{first_call}", tools[0].name),) if tools else ()


@tool
async def look() -> str:
    """Look around."""
    return "The harbour is quiet, two ships lie at the pier, and somebody mends a net in the shade of a wall."


@reward
def checksum(response: str) -> float:
    """The same reward as on the other side."""
    return score_of(response)


def measure(work: dict[str, Any]) -> SideResult:
    """Train, and return the time of each step."""
    clock: list[tuple[float, float]] = []
    steps: list[dict[str, float]] = []

    def watch(event: Event) -> None:
        if isinstance(event, TrainingStarted | StepFinished):
            clock.append((time.perf_counter(), time.process_time()))
        if isinstance(event, StepFinished):
            steps.append(event.metrics)

    events = EventStream()
    with tempfile.TemporaryDirectory() as scratch, events.subscribed(watch):
        signals.run_until_signal(_train(work, Path(scratch), events))
    counted = range(work["warmup"], len(steps))
    return SideResult(
        step_seconds=[clock[step + 1][0] - clock[step][0] for step in counted],
        step_cpu_seconds=[clock[step + 1][1] - clock[step][1] for step in counted],
        sampled_tokens=[int(steps[step]["rows/sampled_tokens"]) for step in counted],
        tokens=[int(steps[step]["rows/tokens"]) for step in counted],
        peak_mib=peak_mib(),
        versions={name: version(name) for name in ("transformers", "torch")},
    )


async def _train(work: dict[str, Any], scratch: Path, events: EventStream) -> None:
    policy = FixedLengthPolicy.load(work["model"], device="cpu", dtype=work["dtype"], threads=work["threads"])
    agent = Agent(
        model=work["model"],
        tools=[look] if work["turns"] > 1 else [],
        tool_call_format=EveryTurnCalls(),
        max_turns=work["turns"],
        max_tokens_per_turn=work["sampled"],
    )
    steps = work["warmup"] + work["steps"]
    config = TrainConfig(
        steps=steps,
        checkpoint_every_steps=steps,
        tasks_per_step=work["tasks"],
        attempts=work["attempts"],
        learning_rate=work["learning_rate"],
        micro_batch_tokens=_ALL_AT_ONCE,
        gradient_checkpointing=work["gradient_checkpointing"],
    )
    async with policy:
        run = Trainer(
            agent, work["prompts"], checksum, run_dir=scratch / "run", config=config, events=events, policy=policy
        )
        await run.run()


if __name__ == "__main__":
    print(json.dumps(asdict(measure(json.loads(sys.argv[1])))))
