"""The KV cache: its content survives failures, and a sequence uses memory for its own length."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from agentfly.core.errors import PolicyError
from agentfly.policies.embedded import kv_cache
from agentfly.policies.embedded.continuous_batching import ContinuousBatch, GenerationRequest
from agentfly.policies.embedded.kv_cache import MIN_CAPACITY, KVCache
from agentfly.policies.embedded.policy import EmbeddedPolicy
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import SamplingParams


def fill(store: KVCache, slot: int, length: int, value: float) -> None:
    """Have two layers keep ``value`` for every token of a slot."""
    place = store.row_of(slot)
    for layer in range(2):
        for buffer in store.buffers(place.capacity, layer, torch.zeros(1, 2, 4), torch.zeros(1, 2, 3)):
            buffer[place.row, :length] = value


def kept(store: KVCache, slot: int, length: int) -> set[float]:
    place = store.row_of(slot)
    buffers = [store.buffers(place.capacity, layer, torch.zeros(0), torch.zeros(0)) for layer in range(2)]
    return {float(value) for pair in buffers for buffer in pair for value in buffer[place.row, :length].flatten()}


@contextmanager
def memory_for(monkeypatch: pytest.MonkeyPatch, allocations: int) -> Iterator[None]:
    """Let so many buffers be made, and no more."""
    whole, made = kv_cache._CapacityBucket._zeros, []

    def zeros(self: object, rows: int, like: torch.Tensor) -> torch.Tensor:
        made.append(rows)
        if len(made) > allocations:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(self, rows, like)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(kv_cache._CapacityBucket, "_zeros", zeros)
        yield


@pytest.mark.slow
def test_a_sequence_keeps_what_was_computed_as_it_grows_past_every_length() -> None:
    store = KVCache()
    for length in range(1, 5 * MIN_CAPACITY, 7):
        for slot in range(3):
            store.reserve(slot, length * (slot + 1), 0 if length == 1 else (length - 7) * (slot + 1))
            if length > 1:
                assert kept(store, slot, (length - 7) * (slot + 1)) == {float(slot)}
            fill(store, slot, length * (slot + 1), slot)


@pytest.mark.parametrize("allocations", range(4))
@pytest.mark.parametrize(
    ("slot", "length", "keep"), [(2, MIN_CAPACITY, 0), (0, MIN_CAPACITY + 1, MIN_CAPACITY)], ids=["row", "move"]
)
def test_a_store_that_finds_no_memory_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, allocations: int, slot: int, length: int, keep: int
) -> None:
    store = KVCache()
    for old in range(2):
        store.reserve(old, MIN_CAPACITY, 0)
        fill(store, old, MIN_CAPACITY, old)
    places = [store.row_of(old) for old in range(2)]
    with memory_for(monkeypatch, allocations), pytest.raises(torch.OutOfMemoryError):
        store.reserve(slot, length, keep)
    assert [store.row_of(old) for old in range(2)] == places
    assert [kept(store, old, MIN_CAPACITY) for old in range(2)] == [{0.0}, {1.0}]


def test_one_long_sequence_does_not_make_the_short_ones_cost_its_length() -> None:
    store = KVCache()
    for slot in range(40):
        store.reserve(slot, 100, 0)
    store.reserve(40, 600, 0)
    assert store.tokens <= 2 * (40 * 100 + 600)


def test_what_is_forgotten_goes_before_more_memory_is_taken() -> None:
    store = KVCache()
    store.reserve(0, 300, 0)
    tokens = store.tokens
    assert store.reserve(1, 400, 0, spare=[0]) == 0
    assert store.tokens == tokens


def batch_of(model: PreTrainedModel, **limits: int) -> ContinuousBatch:
    return ContinuousBatch(model, **{"max_concurrent": 8, "max_cached_sequences": 16, "context_length": 1024, **limits})


def request(prompt: list[int], max_tokens: int = 4, priority: int = 0) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, priority=priority)
    return GenerationRequest(str(prompt), array("i", prompt), sampling, random.Random(0))


def finish(batch: ContinuousBatch) -> list[GenerationRequest]:
    ended: list[GenerationRequest] = []
    with torch.no_grad():
        while batch.waiting or batch.running:
            ended += batch.step()
    return ended


def test_rollouts_that_come_and_go_take_no_more_memory_than_those_at_once(model: PreTrainedModel) -> None:
    batch = batch_of(model)

    def wave(first: int) -> int:
        for number in range(8):
            prompt = [first + number, *range(1, 140)]
            batch.enqueue(request(prompt))
        for ended in finish(batch):
            batch.forget(ended.rollout_id)
        return batch._store.tokens

    tokens = wave(0)
    assert {wave(first) for first in (8, 16, 24)} == {tokens}


def test_an_update_of_the_weights_gives_the_memory_back(model: PreTrainedModel) -> None:
    batch = batch_of(model)
    batch.enqueue(request([1, 2, 3]))
    finish(batch)
    assert batch._store.tokens > 0
    batch.invalidate_cache(1)
    assert batch._store.tokens == 0


@pytest.mark.parametrize("allocations", range(0, 16, 3))
async def test_memory_that_runs_out_fails_what_runs_and_nothing_after_it(
    model: PreTrainedModel, tokenizer: HFTokenizer, monkeypatch: pytest.MonkeyPatch, allocations: int
) -> None:
    chance = random.Random(0)
    prompts = [[chance.randrange(1, 260) for _ in range(length)] for length in (5, 100, 120, 125, 250, 300)]
    sampling = SamplingParams(max_tokens=16)
    async with EmbeddedPolicy(model, tokenizer) as policy:

        async def all_of_them() -> list[object]:
            work = [policy.generate(prompt, sampling, rollout_id=str(len(prompt))) for prompt in prompts]
            return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)

        with memory_for(monkeypatch, allocations):
            failed = await all_of_them()
        assert any(isinstance(result, PolicyError) for result in failed)
        for result in failed:
            assert not isinstance(result, PolicyError) or "max_concurrent_generations" in str(result)
        for prompt, result in zip(prompts, await all_of_them(), strict=True):
            row = [*prompt, *result.ids]  # type: ignore[attr-defined]
            with torch.no_grad():
                exact = score_tokens(model, [row], [range(len(prompt), len(row))]).logprobs
            assert result.logprobs == pytest.approx(exact.tolist(), abs=1e-4)  # type: ignore[attr-defined]


def test_a_request_that_is_held_back_outlives_a_failure_to_admit_another(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(model)
    earlier = request(list(range(1, 200)))
    batch.enqueue(earlier)
    finish(batch)
    batch.forget(earlier.rollout_id)
    shared = list(range(200, 0, -1))
    takes_the_forgotten_slot, waits_for_its_prefix = request([*shared, 1]), request([*shared, 2])
    finds_no_memory = request([7] * 200)
    batch.waiting.extend([takes_the_forgotten_slot, waits_for_its_prefix, finds_no_memory])
    with torch.no_grad(), memory_for(monkeypatch, 0), pytest.raises(torch.OutOfMemoryError):
        batch.step()
    assert batch.abort() == [takes_the_forgotten_slot, finds_no_memory]
    assert finish(batch) == [waits_for_its_prefix]


def test_generations_of_higher_priority_join_the_batch_first_and_equal_ones_in_their_order(
    model: PreTrainedModel,
) -> None:
    batch = batch_of(model, max_concurrent=1)
    for number, priority in enumerate([0, 1, 0, 2, 1]):
        batch.enqueue(request([number + 1, 9], max_tokens=1, priority=priority))
    assert [ended.prompt[0] for ended in finish(batch)] == [4, 2, 5, 1, 3]
