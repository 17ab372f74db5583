"""Sampling throughput of a policy on multi-turn rollouts: concurrent, one at a time, and compared with other samplers.

Each rollout has three turns and begins with a prompt of random tokens. Every generation has the maximum length.
Between generations, tokens are inserted as a tool result would be. The unit is sampled tokens per second.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from agentfly.core import signals
from agentfly.core.threads.pool import run_in_thread
from agentfly.policies.load import load_policy
from agentfly.policies.policy import Policy, SamplingParams
from agentfly.policies.vllm.policy import VLLMPolicy
from agentfly.resources.model_server.spec import ModelServerSpec

if TYPE_CHECKING:
    from agentfly.policies.embedded.policy import EmbeddedPolicy

TARGET_SPEEDUP = 5.0
"""Target of the ratio of tokens per second: all rollouts at once, over one at a time."""


@dataclass(frozen=True)
class SamplingWorkload:
    """Rollouts of several turns, all of the same lengths.

    Attributes:
        rollouts: number of concurrent rollouts.
        turns: generations of each.
        prompt, sampled, answer: tokens of the first prompt, of each generation, and of what comes between two of them.
    """

    rollouts: int = 32
    turns: int = 3
    prompt: int = 64
    sampled: int = 64
    answer: int = 32
    seed: int = 0

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that one rollout samples."""
        return self.turns * self.sampled


async def tokens_per_second(policy: Policy, work: SamplingWorkload, *, rollouts: int, label: str) -> float:
    """Return the sampled tokens per second of concurrent rollouts.

    Args:
        policy: a policy that is entered.
        work: the content of a rollout.
        rollouts: number of rollouts.
        label: prefix of the rollouts' ids; it must be new for a policy that caches earlier turns.
    """
    chance = random.Random(f"{work.seed}/{label}")
    words = policy.tokenizer.encode_text(_WORDS)
    sampling = SamplingParams(max_tokens=work.sampled)

    async def one(number: int) -> None:
        name = f"{label}-{number}"
        ids = chance.choices(words, k=work.prompt)
        for _ in range(work.turns):
            generation = await policy.generate(ids, sampling, rollout_id=name)
            ids = [*ids, *generation.ids, *chance.choices(words, k=work.answer)]
        policy.release_rollout(name)

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(rollouts)))
    return rollouts * work.sampled_tokens / (time.perf_counter() - began)


def static_batch_tokens_per_second(policy: EmbeddedPolicy, work: SamplingWorkload) -> float:
    """Return the tokens per second of transformers' ``generate`` for all first turns as one static batch."""
    import torch

    words = policy.tokenizer.encode_text(_WORDS)
    chance = random.Random(work.seed)
    prompts = torch.tensor([chance.choices(words, k=work.prompt) for _ in range(work.rollouts)], device=policy.device)
    generate: Any = policy.model.generate
    began = time.perf_counter()
    with torch.no_grad():
        made = generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=work.sampled,
            eos_token_id=None,
            pad_token_id=0,
        )
    return int(made.shape[1] - work.prompt) * work.rollouts / (time.perf_counter() - began)


async def measure_embedded(model: str | Path, work: SamplingWorkload) -> dict[str, float]:
    """Measure the embedded policy with all rollouts at once and one at a time, and transformers' static batch.

    Returns:
        Tokens per second: ``together`` (all rollouts at once), ``alone`` (one at a time), ``static_batch``.
    """
    policy = await run_in_thread(load_policy, model, max_concurrent_generations=work.rollouts)
    async with policy:
        await tokens_per_second(policy, work, rollouts=2, label="first")  # excludes one-time costs
        alone = await tokens_per_second(policy, work, rollouts=1, label="alone")
        together = await tokens_per_second(policy, work, rollouts=work.rollouts, label="together")
        async with policy.exclusive_access():
            static = await run_in_thread(static_batch_tokens_per_second, policy, work)
    return {"together": together, "alone": alone, "static_batch": static}


async def measure_vllm(model: str | Path, work: SamplingWorkload, python: str) -> float:
    """Return the tokens per second of the same rollouts with a vLLM server in the environment of ``python``."""
    spec = ModelServerSpec(model=str(model), python=python, dtype="bfloat16", context_length=2048)
    async with VLLMPolicy(spec) as policy:
        await tokens_per_second(policy, work, rollouts=2, label="first")
        return await tokens_per_second(policy, work, rollouts=work.rollouts, label="together")


def run_sampling_bench(
    model: str | Path, work: SamplingWorkload | None = None, *, vllm_python: str | None = None
) -> dict[str, Any]:
    """Measure the sampling of a model. The result is a JSON value.

    Args:
        model: the model.
        work: what the rollouts are like.
        vllm_python: an interpreter, or a virtual environment, that has vLLM, to be compared with; None for no such
            comparison.

    Raises:
        PrerequisiteError: the model or a package is missing.
    """
    work = work or SamplingWorkload()
    speeds = signals.run_until_signal(measure_embedded(model, work))
    if vllm_python is not None:
        speeds["vllm"] = signals.run_until_signal(measure_vllm(model, work, vllm_python))
    compared = {"over_vllm": round(speeds["together"] / speeds["vllm"], 2)} if "vllm" in speeds else {}
    return {
        "model": str(model),
        "work": asdict(work),
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "speedup": round(speeds["together"] / speeds["alone"], 2),
        "target_speedup": TARGET_SPEEDUP,
        "over_static_batch": round(speeds["together"] / speeds["static_batch"], 2),
        **compared,
    }


def render(result: dict[str, Any]) -> Table:
    """Return the result as a table."""
    work, speeds = result["work"], result["tokens_per_second"]
    table = Table(
        title=f"Sampling {result['model']}: {work['rollouts']} rollouts of {work['turns']} turns, "
        f"{work['sampled']} tokens each"
    )
    for heading in ("", "tokens/s", "ratio", "target"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("all at once", f"{speeds['together']:.0f}", "", "")
    table.add_row(
        "one at a time", f"{speeds['alone']:.0f}", f"{result['speedup']:.2f}", f"{result['target_speedup']:.0f}"
    )
    table.add_row(
        "transformers' static batch, first turn",
        f"{speeds['static_batch']:.0f}",
        f"{result['over_static_batch']:.2f}",
        "1",
    )
    if "vllm" in speeds:
        table.add_row("vLLM, all at once", f"{speeds['vllm']:.0f}", f"{result['over_vllm']:.2f}", "1")
    return table


_WORDS = (
    "the quick brown fox jumps over a lazy dog while seven sailors count their coins and rain falls on old stone "
    "roofs before morning comes with bread, tea and news of ships from far away"
)
