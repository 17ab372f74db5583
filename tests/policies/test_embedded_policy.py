"""The embedded policy: rows join and leave a running batch, and every token and log-prob is as if it ran alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from agentfly.core.errors import ConfigError, PolicyError, PromptTooLong
from agentfly.policies.embedded.continuous_batching import PREFILL_TOKENS
from agentfly.policies.embedded.policy import EmbeddedPolicy
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import Generation, Policy, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


class Work:
    """Counts the tokens and calls that go through a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens = 0
        self.calls = 0
        self._called = threading.Condition()
        model.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, arguments: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.tokens += kwargs["input_ids"].numel()
        with self._called:
            self.calls += 1
            self._called.notify_all()

    async def begun(self) -> None:
        """Wait until a few tokens have been sampled."""

        def wait() -> None:
            with self._called:
                self._called.wait_for(lambda: self.calls >= 3)

        await asyncio.to_thread(wait)


def policy_of(model: PreTrainedModel, tokenizer: HFTokenizer, **settings: int) -> EmbeddedPolicy:
    return EmbeddedPolicy(model, tokenizer, **settings)


def logprobs_alone(
    model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of ``ids`` after ``prompt`` by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0] / temperature
    scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return scores[range(len(ids)), list(ids)].tolist()


def assert_exact(model: PreTrainedModel, prompt: Sequence[int], generation: Generation) -> None:
    assert generation.logprobs == pytest.approx(logprobs_alone(model, prompt, generation.ids), abs=1e-4)


def random_prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1, 260) for _ in range(length)]


def test_it_is_a_policy(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    assert isinstance(policy_of(model, tokenizer), Policy)


@pytest.mark.slow
async def test_rows_that_join_and_leave_at_any_token_decode_as_they_do_alone(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    chance = random.Random(0)

    async def one(number: int) -> None:
        prompt, length = random_prompt(chance, chance.randrange(1, 80)), chance.randrange(1, 40)
        await asyncio.sleep(chance.random() / 20)
        sampling = SamplingParams(temperature=0, max_tokens=length)
        generation = await policy.generate(prompt, sampling, rollout_id=str(number))
        tokens = torch.tensor([prompt])
        alone = model.generate(  # type: ignore[operator]
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=length, eos_token_id=None
        )
        assert list(generation.ids) == alone[0, len(prompt) :].tolist()
        assert generation.finish_reason == "length"
        assert_exact(model, prompt, generation)

    async with policy_of(model, tokenizer, max_concurrent_generations=8) as policy:
        await asyncio.gather(*(one(number) for number in range(30)))


@pytest.mark.slow
async def test_sixty_four_rollouts_of_several_turns_at_once(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    chance = random.Random(1)
    examples = random_prompt(chance, 40)

    async def rollout(number: int) -> None:
        ids = examples + random_prompt(chance, 10)
        for _ in range(3):
            sampling = SamplingParams(max_tokens=chance.randrange(1, 12))
            generation = await policy.generate(ids, sampling, rollout_id=str(number))
            assert_exact(model, ids, generation)
            ids = ids + list(generation.ids) + random_prompt(chance, 5)
            await asyncio.sleep(chance.random() / 50)
        policy.release_rollout(str(number))

    async with policy_of(model, tokenizer, max_concurrent_generations=64) as policy:
        await asyncio.gather(*(rollout(number) for number in range(64)))


async def test_log_probs_are_those_of_the_tempered_distribution(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    async with policy_of(model, tokenizer) as policy:
        generation = await policy.generate([5, 6, 7], SamplingParams(temperature=0.6, max_tokens=20), rollout_id="a")
    assert generation.logprobs == pytest.approx(logprobs_alone(model, [5, 6, 7], generation.ids, 0.6), abs=1e-4)
    assert generation.raw_logprobs == pytest.approx(logprobs_alone(model, [5, 6, 7], generation.ids, 1.0), abs=1e-4)


async def test_a_later_turn_computes_only_what_is_new(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    work = Work(model)
    async with policy_of(model, tokenizer) as policy:
        prompt = random_prompt(random.Random(0), 50)
        first = await policy.generate(prompt, GREEDY, rollout_id="a")
        assert work.tokens == 50 + 11  # the last sampled token is not fed
        follow_up = [*prompt, *first.ids, 7, 8, 9]
        work.tokens = 0
        second = await policy.generate(follow_up, GREEDY, rollout_id="a")
        assert work.tokens == (1 + 3) + 11
    assert_exact(model, follow_up, second)


async def test_the_attempts_of_a_group_compute_their_prompt_once(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    work = Work(model)
    prompt = random_prompt(random.Random(0), 100)
    async with policy_of(model, tokenizer) as policy:
        one_token = SamplingParams(max_tokens=1)
        generations = await asyncio.gather(
            *(policy.generate(prompt, one_token, rollout_id=str(attempt)) for attempt in range(8))
        )
    assert work.tokens == 100 + 7 * 1
    for generation in generations:
        assert_exact(model, prompt, generation)


async def test_with_few_slots_earlier_turns_are_evicted_and_nothing_goes_wrong(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    async def rollout(number: int) -> None:
        ids = random_prompt(random.Random(number), 30)
        for _ in range(3):
            generation = await policy.generate(ids, SamplingParams(max_tokens=6), rollout_id=str(number))
            assert_exact(model, ids, generation)
            ids = [*ids, *generation.ids, 3, 4]

    async with policy_of(model, tokenizer, max_concurrent_generations=2, max_cached_sequences=2) as policy:
        await asyncio.gather(*(rollout(number) for number in range(7)))


async def test_a_prompt_longer_than_one_step_takes_is_computed_in_parts(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    prompt = random_prompt(random.Random(0), PREFILL_TOKENS + 100)
    async with policy_of(model, tokenizer) as policy:
        short, long = await asyncio.gather(
            policy.generate(prompt[:9], GREEDY, rollout_id="short"),
            policy.generate(prompt, GREEDY, rollout_id="long"),
        )
    assert_exact(model, prompt[:9], short)
    assert_exact(model, prompt, long)


async def test_a_cancelled_generation_leaves_the_batch(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    work = Work(model)
    async with policy_of(model, tokenizer) as policy:
        endless = asyncio.create_task(policy.generate([1, 2], SamplingParams(max_tokens=1000), rollout_id="a"))
        await work.begun()
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        async with policy.exclusive_access():  # waits until nothing runs
            assert work.calls < 500
        generation = await policy.generate([1, 2], GREEDY, rollout_id="b")
    assert_exact(model, [1, 2], generation)


async def test_samples_depend_on_the_seed_and_the_rollout_not_on_who_runs_besides(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    async def samples(order: Sequence[int], seed: int, at_once: int) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}

        async def rollout(number: int) -> None:
            ids = random_prompt(random.Random(number), 10 + number)
            turns = []
            for _ in range(2):
                generation = await policy.generate(ids, SamplingParams(max_tokens=8), rollout_id=f"r{number}")
                turns.append(list(generation.ids))
                ids = ids + turns[-1]
            found[number] = turns

        async with policy_of(model, tokenizer, seed=seed, max_concurrent_generations=at_once) as policy:
            await asyncio.gather(*(rollout(number) for number in order))
        return found

    first = await samples(range(8), seed=0, at_once=8)
    assert await samples([5, 0, 7, 2, 1, 6, 4, 3], seed=0, at_once=3) == first
    assert await samples(range(8), seed=1, at_once=8) != first


async def test_a_generation_with_its_own_seed_repeats(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    async with policy_of(model, tokenizer) as policy:
        seeded = SamplingParams(max_tokens=16, seed=7)
        runs = [await policy.generate([1, 2, 3], seeded, rollout_id=str(number)) for number in range(2)]
        other = await policy.generate([1, 2, 3], SamplingParams(max_tokens=16), rollout_id="c")
    assert runs[0].ids == runs[1].ids
    assert runs[0].ids != other.ids


async def test_a_sampled_stop_token_is_the_last_and_ends_the_generation(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    async with policy_of(model, tokenizer) as policy:
        free = await policy.generate([5, 6], GREEDY, rollout_id="a")
        stop = free.ids[4]
        until = list(free.ids).index(stop) + 1
        stopped = await policy.generate(
            [5, 6], SamplingParams(temperature=0, max_tokens=12, stop_ids=(299, stop)), rollout_id="b"
        )
    assert list(stopped.ids) == list(free.ids[:until])
    assert (stopped.finish_reason, len(stopped.logprobs or ())) == ("stop", until)


async def test_the_context_length_cuts_a_generation(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    async with policy_of(model, tokenizer, max_context_tokens=10) as policy:
        generation = await policy.generate([1] * 6, GREEDY, rollout_id="a")
        assert (len(generation.ids), generation.finish_reason) == (4, "length")
        with pytest.raises(PromptTooLong, match="10 tokens and the policy holds 10"):
            await policy.generate([1] * 10, GREEDY, rollout_id="a")


async def test_training_has_the_model_alone_and_its_update_takes_effect_at_once(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    prompt = random_prompt(random.Random(0), 30)
    async with policy_of(model, tokenizer) as policy:
        before = await policy.generate(prompt, GREEDY, rollout_id="a")
        async with policy.exclusive_access() as trained:
            waiting = asyncio.create_task(policy.generate(prompt, GREEDY, rollout_id="a"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            with torch.no_grad():
                for weights in trained.parameters():
                    weights.add_(0.05 * torch.randn_like(weights))
            policy.weights_updated()
        after = await waiting
    assert (before.version, after.version, policy.version) == (0, 1, 1)
    assert_exact(model, prompt, after)
    assert after.logprobs != before.logprobs


async def test_a_resumed_run_sets_the_version(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    async with policy_of(model, tokenizer) as policy:
        async with policy.exclusive_access():
            policy.weights_updated(17)
        assert (await policy.generate([1, 2], GREEDY, rollout_id="a")).version == policy.version == 17


async def test_exclusive_use_waits_for_running_generations(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    work = Work(model)
    async with policy_of(model, tokenizer) as policy:
        running = asyncio.create_task(policy.generate([1, 2], SamplingParams(max_tokens=50), rollout_id="a"))
        await work.begun()
        async with policy.exclusive_access():
            assert len((await running).ids) == 50


async def test_diverged_weights_fail_the_generation_and_say_so(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    weights = model.get_output_embeddings().weight
    sound = weights.detach().clone()
    async with policy_of(model, tokenizer) as policy:
        with torch.no_grad():
            weights.fill_(float("nan"))
        with pytest.raises(PolicyError, match="diverged"):
            await policy.generate([1, 2], GREEDY, rollout_id="a")
        with torch.no_grad():
            weights.copy_(sound)
        assert_exact(model, [1, 2], await policy.generate([1, 2], GREEDY, rollout_id="a"))


async def test_a_step_that_fails_fails_its_generations_and_no_others(
    model: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    async with policy_of(model, tokenizer) as policy:
        hook = model.get_decoder().register_forward_pre_hook(broken)
        results = await asyncio.gather(
            *(policy.generate([1, number], GREEDY, rollout_id=str(number)) for number in range(3)),
            return_exceptions=True,
        )
        assert all(isinstance(result, PolicyError) and "out of memory" in str(result) for result in results)
        hook.remove()
        assert_exact(model, [1, 2], await policy.generate([1, 2], GREEDY, rollout_id="a"))


async def test_closing_fails_what_still_runs(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    policy = policy_of(model, tokenizer)
    async with policy:
        running = asyncio.create_task(policy.generate([1, 2], SamplingParams(max_tokens=1000), rollout_id="a"))
        await asyncio.sleep(0.02)
    with pytest.raises(PolicyError, match="closed"):
        await running
    with pytest.raises(PolicyError, match="async with"):
        await policy.generate([1, 2], GREEDY, rollout_id="a")


async def test_a_policy_can_be_entered_again(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    policy = policy_of(model, tokenizer)
    for _ in range(2):
        async with policy:
            assert_exact(model, [1, 2], await policy.generate([1, 2], GREEDY, rollout_id="a"))


@pytest.mark.parametrize("prompt", [[], [-1], [260]])
async def test_a_prompt_that_is_none_is_refused_alone(
    model: PreTrainedModel, tokenizer: HFTokenizer, prompt: list[int]
) -> None:
    async with policy_of(model, tokenizer) as policy:
        with pytest.raises(PolicyError):
            await policy.generate(prompt, GREEDY, rollout_id="a")


def test_contradicting_limits_are_refused(model: PreTrainedModel, tokenizer: HFTokenizer) -> None:
    with pytest.raises(ConfigError, match="max_cached_sequences"):
        policy_of(model, tokenizer, max_concurrent_generations=8, max_cached_sequences=4)
    with pytest.raises(ConfigError, match="2 to 1024"):
        policy_of(model, tokenizer, max_context_tokens=4096)
