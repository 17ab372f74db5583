"""Compare transformers' continuous batching with the embedded sampler: exactness, speed, cancellation, new weights.

    python scripts/compare_batching.py [--model MODEL]

Both sample the same prompts from the same model in one process, at temperature 1 without cuts. The weights are float32.
`docs/results/continuous-batching.md` records the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from agentfly.policies.embedded.policy import EmbeddedPolicy
from agentfly.policies.load import load_policy
from agentfly.policies.policy import SamplingParams

NEW_TOKENS = 64
Sampled = list[tuple[list[int], list[int], list[float]]]
"""Prompt, sampled ids and their log-probs, one entry for each request."""


def largest_difference(model: Any, sampled: Sampled) -> float:
    """Return the largest absolute difference of the log-probs from a plain forward pass, in nats."""
    largest = 0.0
    with torch.no_grad():
        for prompt, ids, logprobs in sampled:
            logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            plain = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            largest = max(largest, float((plain - torch.tensor(logprobs)).abs().max()))
    return largest


async def sample_embedded(policy: EmbeddedPolicy, prompts: Sequence[list[int]], label: str) -> Sampled:
    """Sample all prompts at once by the embedded policy."""
    names = [f"{label}-{number}" for number in range(len(prompts))]
    made = await asyncio.gather(
        *(
            policy.generate(prompt, SamplingParams(max_tokens=NEW_TOKENS), rollout_id=name)
            for prompt, name in zip(prompts, names, strict=True)
        )
    )
    for name in names:
        policy.release_rollout(name)
    return [(prompt, list(one.ids), list(one.logprobs or ())) for prompt, one in zip(prompts, made, strict=True)]


def sample_transformers(manager: Any, prompts: Sequence[list[int]]) -> Sampled:
    """Sample all prompts at once by a running manager of transformers."""
    names = manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=NEW_TOKENS)
    results: dict[str, Any] = {}
    while len(results) < len(names):
        if (result := manager.get_result(timeout=60)) is None:
            raise RuntimeError("transformers' generation loop has ended")
        if result.error is not None:
            raise RuntimeError(result.error)
        if result.is_finished():
            results[result.request_id] = result
    return [(p, results[n].generated_tokens, results[n].logprobs) for p, n in zip(prompts, names, strict=True)]


def speed(sampled: Sampled, seconds: float) -> float:
    """Return sampled tokens per second."""
    return sum(len(ids) for _, ids, _ in sampled) / seconds


def changed_weights(model: Any) -> None:
    """Change the weights in place, as an update of a trainer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def cancelled_after(manager: Any, prompt: list[int]) -> int:
    """Cancel one long request. Return how many tokens it sampled after the cancellation was requested."""
    name = manager.add_request(list(prompt), max_new_tokens=400, streaming=True, eos_token_id=-1)
    sampled = after = 0
    cancelled = False
    while (result := manager.get_result(timeout=1)) is not None:
        if result.request_id != name:
            continue
        sampled = len(result.generated_tokens)
        if not cancelled and sampled >= 8:
            manager.cancel_request(name)
            cancelled, after = True, sampled
    return sampled - after


async def embedded_gap_after_update(policy: EmbeddedPolicy, prompt: list[int]) -> float:
    """Do the same as `gap_after_update` with the embedded policy."""
    await sample_embedded(policy, [prompt], "before")
    original = {name: value.clone() for name, value in policy.model.state_dict().items()}
    async with policy.exclusive_access() as model:
        changed_weights(model)
        policy.weights_updated()
    sampled = await sample_embedded(policy, [prompt], "after")
    async with policy.exclusive_access() as model:
        attention = model.config._attn_implementation
        model.set_attn_implementation("eager")
        gap = largest_difference(model, sampled)
        model.set_attn_implementation(attention)
        model.load_state_dict(original)
        policy.weights_updated()
    return gap


def gap_after_update(manager: Any, model: Any, prompt: list[int]) -> float:
    """Update the weights inside the manager's pause. Return the difference of the log-probs sampled afterwards.

    The prompt was sampled from before the update, so keys and values of the old weights may be in the cache.
    """
    sample_transformers(manager, [prompt])
    original = {name: value.clone() for name, value in model.state_dict().items()}
    with manager.pause():
        changed_weights(model)
    sampled = sample_transformers(manager, [prompt])
    attention = model.config._attn_implementation
    with manager.pause():
        model.set_attn_implementation("eager")
        gap = largest_difference(model, sampled)
        model.set_attn_implementation(attention)
        model.load_state_dict(original)
    return gap


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    policy = load_policy(options.model, dtype="float32", device="cpu")
    model: Any = policy.model
    own_attention = model.config._attn_implementation
    words = policy.tokenizer.encode_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.")
    chance = random.Random(0)

    def prompts(count: int, length: int = 64) -> list[list[int]]:
        return [chance.choices(words, k=length) for _ in range(count)]

    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS)  # type: ignore[no-untyped-call]
    settings.eos_token_id = model.generation_config.eos_token_id
    for count in (1, 8, 32):
        speeds: dict[str, list[float]] = {"embedded": [], "sdpa": [], "paged|eager": []}
        gaps = dict.fromkeys(speeds, 0.0)
        for repeat in range(options.repeats):
            for name, measured in speeds.items():
                asked = prompts(count)
                model.set_attn_implementation(own_attention if name == "embedded" else name)
                if name == "embedded":
                    async with policy:
                        await sample_embedded(policy, prompts(2), "first")
                        began = time.perf_counter()
                        sampled = await sample_embedded(policy, asked, "measured")
                        seconds = time.perf_counter() - began
                        if count == 1 and repeat == 0:
                            gap = await embedded_gap_after_update(policy, prompts(1, length=600)[0])
                            print(f"{name}: difference after an update of the weights: {gap:.1e} nats")
                else:
                    batching = ContinuousBatchingConfig(
                        return_logprobs=True, num_blocks=64, max_batch_tokens=4096, auto_switch_to_flash=False
                    )
                    with model.continuous_batching_context_manager(
                        generation_config=settings, continuous_batching_config=batching, block=True, timeout=30
                    ) as manager:
                        sample_transformers(manager, prompts(2))
                        began = time.perf_counter()
                        sampled = sample_transformers(manager, asked)
                        seconds = time.perf_counter() - began
                        if count == 1 and repeat == 0:
                            print(f"{name}: tokens after a cancellation: {cancelled_after(manager, asked[0])}")
                            gap = gap_after_update(manager, model, prompts(1, length=600)[0])
                            print(f"{name}: difference after an update of the weights: {gap:.1e} nats")
                model.set_attn_implementation("eager")
                gaps[name] = max(gaps[name], largest_difference(model, sampled))
                measured.append(speed(sampled, seconds))
        print(f"{count} at once, tokens per second:", {name: round(statistics.median(s)) for name, s in speeds.items()})
        print("largest difference from a plain pass, nats:", {name: f"{gap:.1e}" for name, gap in gaps.items()})


if __name__ == "__main__":
    asyncio.run(main())
