"""Sampling: tokens are drawn from the stated distribution, and their log-probs belong to it."""

from __future__ import annotations

import math
import random

import pytest
import torch

from agentfly.policies.embedded.sampling import sample
from agentfly.policies.policy import SamplingParams


def draw(logits: torch.Tensor, sampling: SamplingParams, count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    chance = random.Random(0)
    rows = logits.expand(count, -1)
    ids, logprobs, _ = sample(rows, [sampling] * count, [chance.random() for _ in range(count)])
    return ids, logprobs


def test_the_log_prob_is_that_of_the_scaled_distribution() -> None:
    ids, logprobs, raw_logprobs = sample(torch.tensor([[2.0, 1.0, 0.0]]), [SamplingParams(temperature=0.5)], [0.1])
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(-0.143, abs=1e-3)
    assert raw_logprobs.item() == pytest.approx(-0.408, abs=1e-3)


@pytest.mark.slow
def test_tokens_come_with_their_probabilities() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 1000)
    ids, logprobs = draw(logits, SamplingParams(temperature=0.7))
    expected = (logits[0] / 0.7).softmax(-1)
    found = torch.bincount(ids, minlength=1000) / len(ids)
    by_chance = (2 * expected * (1 - expected) / len(ids) / math.pi).sqrt().sum()
    assert (found - expected).abs().sum() < 1.5 * by_chance
    torch.testing.assert_close(logprobs, expected.log()[ids], atol=1e-5, rtol=0)


def test_top_k_then_top_p_cut_and_are_normalised_again() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    ids, logprobs = draw(logits, SamplingParams(top_k=3, top_p=0.6), 1000)
    assert set(ids.tolist()) == {0, 1}  # of three tokens with 4/9, 3/9, 2/9, the first two hold 0.6
    for token, probability in ((0, 4 / 7), (1, 3 / 7)):
        assert logprobs[ids == token].exp().mean().item() == pytest.approx(probability, abs=1e-5)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((4, 700), float("-inf"))
    logits[:, [3, 650]] = 0.0
    ids, logprobs, _ = sample(logits, [SamplingParams()] * 4, [0.0, 0.4999, 0.5001, 1 - 2**-53])
    assert ids.tolist() == [3, 3, 650, 650]
    torch.testing.assert_close(logprobs.exp(), torch.full((4,), 0.5))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_barred_token_is_never_drawn_and_the_others_share_its_probability(temperature: float) -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    how = SamplingParams(temperature=temperature)
    barred = SamplingParams(temperature=temperature, top_k=2, suppressed_ids=(0,))
    ids, logprobs, raw = sample(logits, [barred, how], [0.0, 0.0])
    assert ids.tolist() == [1, 0]
    expected = (torch.tensor([1.0, 0.0]) / (temperature or 1.0)).log_softmax(-1)[0]
    torch.testing.assert_close(logprobs[0], expected)
    torch.testing.assert_close(raw[0], logits[0].log_softmax(-1)[1])
    alone = sample(logits[1:], [how], [0.0])
    assert (logprobs[1], raw[1]) == (alone[1][0], alone[2][0])


def test_rows_of_one_batch_are_sampled_each_in_its_own_way() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]]).expand(3, -1)
    ways = [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams()]
    ids, logprobs, raw_logprobs = sample(logits, ways, [0.9, 0.9, 0.0])
    assert ids.tolist() == [1, 1, 0]
    plain = logits[0].log_softmax(-1)
    assert logprobs.tolist() == pytest.approx([plain[1].item(), 0.0, plain[0].item()], abs=1e-6)
    assert raw_logprobs.tolist() == pytest.approx([plain[1].item(), plain[1].item(), plain[0].item()], abs=1e-6)
