"""Ids without a token are neither sampled nor part of the distribution, in sampling and in scoring."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentfly.policies.catalog import resolve_model
from agentfly.policies.embedded.packed_attention import enable_packed_attention
from agentfly.policies.embedded.policy import EmbeddedPolicy
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import SamplingParams, unsampleable_ids
from agentfly.policies.vllm.policy import MAX_SUPPRESSED_IDS, VLLMPolicy
from agentfly.training.config.groups import KLConfig
from agentfly.training.learning.kl_penalty import KLPenalty
from agentfly.training.rows import Row
from tests.support.fake_vllm_server import FakeVLLMServer

TOKENS = 260
ROWS = TOKENS + 64
PROMPT = [5, 6, 7]


@pytest.fixture
def padded(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A model that would rather sample from its 64 rows of padding than from any of its tokens."""
    model = make_model(rows=ROWS)
    enable_packed_attention(model)
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] *= 20
    return model


def plain(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of all tokens at each place of ids, by one plain forward pass; [T, TOKENS]."""
    logits = model(torch.tensor([ids])).logits[0, :, :TOKENS]
    return (logits / temperature).log_softmax(-1)


WAYS = [
    SamplingParams(max_tokens=40),
    SamplingParams(temperature=0.6, max_tokens=40),
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(top_k=5, max_tokens=40),
    SamplingParams(top_p=0.8, max_tokens=40),
    SamplingParams(max_tokens=40, suppressed_ids=(1, 2, 3)),
]


@pytest.mark.parametrize("how", WAYS, ids=["plain", "warm", "greedy", "top k", "top p", "barred"])
async def test_no_way_of_sampling_draws_from_the_padding(
    how: SamplingParams, padded: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    shares = padded(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    assert shares[TOKENS:].sum() > 0.5, "the padding would be sampled"
    assert shares.argmax() >= TOKENS
    async with EmbeddedPolicy(padded, tokenizer) as policy:
        generation = await policy.generate(PROMPT, how, rollout_id="r")
    assert len(generation.ids) == 40
    assert max(generation.ids) < TOKENS
    scores = plain(padded, [*PROMPT, *generation.ids])[len(PROMPT) - 1 : -1]
    raw = scores[range(40), list(generation.ids)]
    assert generation.raw_logprobs == pytest.approx(raw.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_tokens_are_scored_under_the_distribution_that_they_were_sampled_from(
    temperature: float, padded: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    async with EmbeddedPolicy(padded, tokenizer) as policy:
        how = SamplingParams(temperature=temperature, max_tokens=40)
        generation = await policy.generate(PROMPT, how, rollout_id="r")
    row = [*PROMPT, *generation.ids]
    for model in (padded, copy.deepcopy(padded)):
        scores = score_tokens(model, [row], [range(3, len(row))], temperature=temperature)
        assert scores.logprobs.tolist() == pytest.approx(list(generation.logprobs), abs=1e-4)
        logprobs = plain(model, row, temperature)[2:-1]
        torch.testing.assert_close(scores.entropy, -(logprobs.exp() * logprobs).sum(-1), atol=1e-4, rtol=1e-4)
    model.zero_grad()
    (scores.logprobs.sum() + 0.3 * scores.entropy.sum()).backward()
    gradient = model.lm_head.weight.grad
    assert gradient.isfinite().all()
    assert not gradient[TOKENS:].any()
    assert gradient[:TOKENS].any()


def test_the_divergence_over_the_vocabulary_leaves_the_padding_out(
    padded: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    EmbeddedPolicy(padded, tokenizer)
    penalty = KLPenalty(padded, KLConfig(coefficient=1.0, estimator="full"), temperature=1.0, adapters=False)
    ids = [5, 6, 7, 8, 9]
    before = plain(padded, ids)
    with torch.no_grad():
        padded.lm_head.weight += 0.01 * torch.randn_like(padded.lm_head.weight)
    after = plain(padded, ids)
    row = Row(ids, [0, 1, 1, 1, 1], [0.0] * 5, [0] * 5, "group", "rollout", 1.0, False)
    found = penalty.estimate([row], None, None)
    torch.testing.assert_close(found, (after.exp() * (after - before)).sum(-1)[:-1], atol=1e-5, rtol=1e-4)


def test_a_row_with_an_id_of_the_padding_is_refused_and_not_scored(
    padded: PreTrainedModel, tokenizer: HFTokenizer
) -> None:
    EmbeddedPolicy(padded, tokenizer)
    with pytest.raises(ValueError, match=f"The id {TOKENS} is never sampled"):
        score_tokens(padded, [[1, 2, TOKENS]], [[1, 2]])
    assert len(score_tokens(padded, [[1, TOKENS, 2]], [[2]]).logprobs) == 1, "it may be read"


def test_ids_within_the_vocabulary_that_no_token_has_are_never_sampled(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    whole = HFTokenizer(hf_tokenizer)
    assert whole.vocabulary_ids == range(TOKENS)
    assert unsampleable_ids(whole, TOKENS + 2) == (TOKENS, TOKENS + 1)
    backend = json.loads(hf_tokenizer.backend_tokenizer.to_str())
    del backend["model"]["vocab"]["a"]
    with_hole = PreTrainedTokenizerFast(
        tokenizer_object=type(hf_tokenizer.backend_tokenizer).from_str(json.dumps(backend))
    )
    ids = set(with_hole.get_vocab().values())
    holes = sorted(set(range(max(ids))) - ids)
    assert holes
    assert unsampleable_ids(HFTokenizer(with_hole), max(ids) + 2) == (*holes, max(ids) + 1)


@pytest.mark.parametrize(("padding", "sent"), [(3, 3), (5000, MAX_SUPPRESSED_IDS)])
async def test_padding_is_barred_on_servers_as_far_as_they_take_it(padding: int, sent: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    tokens = HFTokenizer.load(model).vocabulary_ids
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokens) + padding}))
    async with (
        FakeVLLMServer() as server,
        VLLMPolicy(urls=[server.url], model=model, server_wait_timeout_s=20, probe_ids=[1, 2, 3]) as policy,
    ):
        generation = await policy.generate([5], SamplingParams(max_tokens=2, suppressed_ids=(3,)), rollout_id="r")
        barred = server.generated[-1]["sampling_params"]["logit_bias"]
        assert list(barred)[: min(len(barred), 3)] == ["3", str(len(tokens)), str(len(tokens) + 1)]
        assert len(barred) == min(sent + 1, MAX_SUPPRESSED_IDS)
        assert generation.raw_logprobs is None, "another id is barred, too"
        generation = await policy.generate([5], SamplingParams(max_tokens=2), rollout_id="r")
        assert generation.raw_logprobs == generation.logprobs
