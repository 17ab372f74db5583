"""score_tokens equals a plain forward pass, gradients included, and computes shared prefixes once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from agentfly.policies.embedded import scoring
from agentfly.policies.embedded.packed_attention import pack_rows
from agentfly.policies.embedded.scoring import score_tokens

Rows = list[list[int]]


def grouped_rows() -> tuple[Rows, Rows]:
    """Three tasks with common examples, four attempts each, and the odd cases: equal rows, prefixes, no targets."""
    chance = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(260) for _ in range(count)]

    rows: Rows = []
    targets: Rows = []
    examples = tokens(20)
    for _ in range(3):
        prompt = examples + tokens(25)
        for _ in range(4):
            row = prompt + tokens(chance.randrange(2, 60))
            rows.append(row)
            targets.append(sorted(chance.sample(range(len(prompt), len(row)), (len(row) - len(prompt) + 1) // 2)))
    rows += [rows[-1], rows[0][:40], tokens(3), tokens(2)]
    targets += [targets[-1], [3, 39], [], [1]]
    return rows, targets


def plain_scores(
    model: PreTrainedModel, rows: Rows, targets: Rows, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropies = [], []
    for row, positions in zip(rows, targets, strict=True):
        if positions:
            scores = (model(torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
            for position in positions:
                logprobs.append(scores[position - 1, row[position]])
                entropies.append(-(scores[position - 1].exp() * scores[position - 1]).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(model: PreTrainedModel, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logprobs))
    loss = (weights * logprobs).sum()
    if entropy is not None:
        loss = loss + 0.3 * (weights * entropy).sum()
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_gradients_equal_a_plain_forward_pass(
    make_model: Callable[..., PreTrainedModel], kind: str, share_prefixes: bool, temperature: float
) -> None:
    model = make_model(kind, tie=kind == "llama")
    rows, targets = grouped_rows()
    logprobs, entropy = plain_scores(model, rows, targets, temperature)
    expected = gradients(model, logprobs, entropy)

    scores = score_tokens(model, rows, targets, temperature=temperature, share_prefixes=share_prefixes)

    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=0)
    for found, wanted in zip(gradients(model, scores.logprobs, scores.entropy), expected, strict=True):
        assert (found - wanted).abs().max() <= 3e-5 * max(1.0, wanted.abs().max().item())


def test_scores_in_chunks_equal_scores_at_once(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    rows, targets = grouped_rows()
    whole = score_tokens(model, rows, targets)
    expected = gradients(model, whole.logprobs, None)
    monkeypatch.setattr(scoring, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 260 * 7)

    chunked = score_tokens(model, rows, targets)

    torch.testing.assert_close(chunked.logprobs, whole.logprobs, atol=1e-6, rtol=0)
    for found, wanted in zip(gradients(model, chunked.logprobs, None), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_plain_call_of_the_model_still_respects_its_padding_mask(make_model: Callable[..., PreTrainedModel]) -> None:
    model, untouched = make_model(), make_model()
    score_tokens(model, [[1, 2, 3]], [[1, 2]])
    padded = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    }
    torch.testing.assert_close(model(**padded).logits[:, 2:], untouched(**padded).logits[:, 2:])


def test_no_targets_give_no_scores(model: PreTrainedModel) -> None:
    assert score_tokens(model, [[1, 2], [3]], [[], []]).logprobs.shape == (0,)


@pytest.mark.parametrize("positions", [[0], [3], [2, 1], [1, 1]])
def test_targets_outside_their_row_are_refused(model: PreTrainedModel, positions: list[int]) -> None:
    with pytest.raises(ValueError, match="targets of row 0"):
        score_tokens(model, [[1, 2, 3]], [positions])


def test_the_prompt_of_a_group_is_computed_once() -> None:
    prompt = list(range(100))
    rows = [[*prompt, 200 + attempt, *range(10)] for attempt in range(8)]
    packed = pack_rows(rows, share_prefixes=True, device=torch.device("cpu"), dtype=torch.float32)
    assert len(packed.ids) == 100 + 8 * 11


def test_examples_shared_by_groups_and_growing_turns_are_computed_once() -> None:
    examples, dialogue = list(range(50)), list(range(100, 180))
    rows = [examples + [90 + group] * 30 + [95 + attempt] * 5 for group in range(2) for attempt in range(3)]
    turns = [dialogue[:40], dialogue[:60], dialogue]
    packed = pack_rows(rows + turns, share_prefixes=True, device=torch.device("cpu"), dtype=torch.float32)
    assert len(packed.ids) == 50 + 2 * 30 + 6 * 5 + 80


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_packed_rows_hold_every_row(data: st.DataObject) -> None:
    stems = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=4))
    rows: list[Sequence[int]] = [
        (data.draw(st.sampled_from(stems)) + data.draw(st.lists(st.integers(0, 2), max_size=40)))
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    packed = pack_rows(rows, share_prefixes=True, device=torch.device("cpu"), dtype=torch.float32)
    for row, indices in zip(rows, packed.row_indices, strict=True):
        assert packed.ids[indices].tolist() == list(row)
        assert packed.positions[indices].tolist() == list(range(len(row)))
