"""The learner with a small random model: what changes the weights, and what does not."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.messages import Image, PlacedImage
from agentfly.training.advantages import Advantages
from agentfly.training.learning.batches import UpdateCancelled
from agentfly.training.losses import LOSSES
from agentfly.training.losses.aggregation import ClipRange, TokenBatch, TokenLoss
from agentfly.training.losses.policy_losses import PolicyLoss, ppo_clip
from agentfly.training.validation import require_advantages
from tests.training.small_learning import constant, learn, learner_of, own_logprobs, rows_of, small_model, weights


@pytest.mark.parametrize("settings", [{}, {"entropy_coefficient": 0.1, "kl": {"coefficient": 0.1}}])
@pytest.mark.parametrize("tokens", [1, 10, 14])
def test_no_split_into_micro_batches_changes_the_update(settings: dict[str, float], tokens: int) -> None:
    whole, split = small_model(), small_model()
    start, rows = weights(whole), rows_of(whole)
    advantages = constant(rows, [1.0, -1.0, 0.0, 0.5])
    expected = learn(learner_of(whole, **settings), rows, advantages)  # type: ignore[arg-type]
    metrics = learn(learner_of(split, micro_batch_tokens=tokens, **settings), rows, advantages)  # type: ignore[arg-type]
    assert (weights(split) - weights(whole)).norm() < 0.01 * (weights(whole) - start).norm()
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_good_tokens_become_likelier_and_bad_ones_less_likely() -> None:
    model = small_model()
    rows = rows_of(model)
    learn(learner_of(model), rows, constant(rows, [1.0, -1.0, 0.0, 0.0]))
    change = [
        np.subtract(own_logprobs(model, row.ids, row.loss_mask, 1.0), row.logprobs)[row.targets].sum()
        for row in rows[:2]
    ]
    assert change[0] > 0 > change[1]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_rows_that_the_model_sampled_match_what_the_learner_scores(temperature: float) -> None:
    model = small_model()
    rows = rows_of(model, temperature)
    metrics = learn(learner_of(model, temperature), rows, constant(rows, [1, -1, 1, -1]))
    assert metrics["mismatch/logprob_diff_max"] < 1e-5
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["policy/kl"] == pytest.approx(0.0, abs=1e-6)


def test_scoring_at_another_temperature_than_the_tokens_were_sampled_at_shows() -> None:
    model = small_model()
    rows = rows_of(model, 0.5)
    assert learn(learner_of(model, 1.0), rows, constant(rows, [1, -1, 1, -1]))["mismatch/logprob_diff_mean"] > 0.05


def test_further_updates_of_a_step_see_the_policy_move() -> None:
    model = small_model()
    rows = rows_of(model)
    metrics = learn(learner_of(model, updates_per_step=4, learning_rate=0.01), rows, constant(rows, [1, -1, 1, -1]))
    assert metrics["policy/updates"] == 4
    assert metrics["policy/ratio_max"] > 1.01
    assert metrics["policy/kl"] > 0
    assert metrics["mismatch/logprob_diff_max"] < 1e-5


def test_each_mini_batch_of_each_epoch_makes_an_update_and_a_small_batch_fewer() -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model, mini_batches=2, updates_per_step=3)
    assert learn(learner, rows, constant(rows, [1, -1, 1, -1]))["policy/updates"] == 6
    assert learn(learner, rows[:1], constant(rows[:1], [1]))["policy/updates"] == 3
    assert learner.updates == 9


def test_a_mini_batch_is_weighted_by_its_own_size_and_each_step_draws_different_ones() -> None:
    ends = []
    for step in (0, 0, 1):
        model = small_model()
        rows = rows_of(model)
        learner = learner_of(model, mini_batches=2)
        learner.steps = step
        learn(learner, rows, constant(rows, [1, -1, 1, -1]))
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    "changed",
    [
        {"adam_betas": (0.5, 0.9)},
        {"adam_epsilon": 1e-2},
        {"weight_decay": 1.0},
        {"max_grad_norm": 1e-9},
        {"learning_rate": 2e-3},
        {"schedule": "linear", "steps": 2},
        {"schedule": "cosine", "steps": 3, "min_learning_rate_ratio": 0.5},
        {"warmup_steps": 5},
        {"mini_batches": 3},
        {"updates_per_step": 2},
        {"lora": {"rank": 2}},
    ],
)
def test_each_optimizer_setting_changes_the_update(changed: dict[str, Any]) -> None:
    ends = []
    for settings in ({}, changed):
        model = small_model()
        rows = rows_of(model)
        learner = learner_of(model, **settings)
        for _ in range(2):
            learn(learner, rows, constant(rows, [1, -1, 1, -1]))
        ends.append(weights(model))
    assert len(ends[0]) != len(ends[1]) or (ends[0] - ends[1]).abs().max() > 1e-6


def test_weight_decay_takes_matrices_and_leaves_the_scales_of_norms() -> None:
    model = small_model()
    rows = rows_of(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    # A gradient of next to nothing, so that hardly anything but the decay moves the weights.
    learner = learner_of(model, weight_decay=1.0, learning_rate=0.1, adam_epsilon=1e6)
    learn(learner, rows, constant(rows, [1, -1, 1, -1]))
    for name, weight in model.named_parameters():
        expected = before[name] * (0.9 if weight.ndim > 1 else 1.0)
        torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (-1, 1), (1, -1)])
def test_a_loss_without_one_value_per_token_is_refused_and_changes_no_weight(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
        made = ppo_clip(batch, clip)
        return dataclasses.replace(made, loss=made.loss.reshape(shape) if shape else made.loss.mean())

    monkeypatch.setattr(LOSSES, "_known", {"ppo_clip": PolicyLoss(odd)})
    model = small_model()
    rows, before = rows_of(model), weights(model)
    with pytest.raises(UsageError, match="one value per token"):
        learn(learner_of(model), rows, constant(rows, [1, -1, 1, -1]))
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("wrong", [lambda one: one[:-1], lambda one: [one[1], one[0], *one[2:]], lambda one: [0.0] * 4])
def test_advantages_that_are_not_one_number_a_sampled_token_are_refused(wrong: Any) -> None:
    rows = rows_of(small_model())
    right = constant(rows, [1, -1, 1, -1])
    require_advantages(Advantages(right, right), rows, "mine")
    for advantages in (Advantages(wrong(right)), Advantages(right, wrong(right))):
        with pytest.raises(UsageError, match="The algorithm 'mine' returned"):
            require_advantages(advantages, rows, "mine")


@pytest.mark.parametrize("values", [None, [0.0] * 4])
def test_a_batch_without_learning_signal_changes_no_weight(values: list[float] | None) -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model, weight_decay=0.1)
    learn(learner, rows, constant(rows, [1, -1, 1, -1]))  # so that the optimizer has momentum
    before = weights(model)
    taught = rows if values else []
    metrics = learn(learner, taught, constant(taught, values or []))
    assert torch.equal(weights(model), before)
    assert metrics["policy/updates"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_non_finite_gradient_changes_no_weight() -> None:
    model = small_model()
    rows = rows_of(model)
    before = weights(model)
    metrics = learn(learner_of(model, mini_batches=4), rows, constant(rows, [math.inf, 0, 0, 0]))
    assert torch.equal(weights(model), before)
    assert (metrics["policy/updates"], metrics["policy/updates_skipped"]) == (0, 1)
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_entropy_bonus_raises_the_entropy() -> None:
    model = small_model()
    rows = rows_of(model)
    nothing = constant(rows, [0.0] * 4)
    learner = learner_of(model, entropy_coefficient=1.0)
    before = learn(learner, rows, nothing)["policy/entropy"]
    assert learn(learner, rows, nothing)["policy/entropy"] > before


def test_the_divergence_penalty_pulls_back_to_the_policy_before_training() -> None:
    model = small_model()
    rows = rows_of(model)
    nothing = constant(rows, [0.0] * 4)
    learner = learner_of(model, kl={"coefficient": 10.0})
    assert learn(learner, rows, nothing)["policy/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    away = learn(learner, rows, nothing)["policy/reference_kl"]
    assert away > 1e-4
    assert learn(learner, rows, nothing)["policy/reference_kl"] < away


def test_a_stopped_update_changes_no_weight_and_leaves_no_gradient() -> None:
    model = small_model()
    rows = rows_of(model)
    before = weights(model)
    stop = threading.Event()
    stop.set()
    with pytest.raises(UpdateCancelled):
        learn(learner_of(model), rows, constant(rows, [1, -1, 1, -1]), stop)
    assert torch.equal(weights(model), before)
    assert all(weight.grad is None for weight in model.parameters())


def test_the_learning_rate_warms_up() -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model, warmup_steps=3, learning_rate=0.3)
    rates = [learn(learner, rows, constant(rows, [0.0] * 4))["policy/learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.slow
def test_updates_too_small_for_a_16_bit_weight_add_up() -> None:
    model = small_model(torch.bfloat16)
    rows = rows_of(model)
    learner = learner_of(model, learning_rate=1e-5)
    start = weights(model)
    for _ in range(60):
        learn(learner, rows, constant(rows, [1, -1, 1, -1]))
    moved = torch.cat([master.flatten() for master in learner.state()["optimizer"]["masters"]]) - start
    large = start.abs() > 0.1  # a bfloat16 step there is at least 2**-12; an update is 1e-5
    assert (moved[large].abs() > 2**-12).any()
    assert (weights(model) - start)[large].abs().sum() > 0
    assert torch.equal(weights(model), (start + moved).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_restored_from_its_state_continues_identically(dtype: torch.dtype) -> None:
    model = small_model(dtype)
    rows = rows_of(model)
    advantages = constant(rows, [1, -1, 1, -1])
    learner = learner_of(model, warmup_steps=4)
    for _ in range(2):
        learn(learner, rows, advantages)
    state, saved = copy.deepcopy(learner.state()), copy.deepcopy(model)
    resumed = learner_of(saved, warmup_steps=4)
    resumed.load_state(state)
    for _ in range(2):
        assert learn(resumed, rows, advantages) == learn(learner, rows, advantages)
    assert torch.equal(weights(saved), weights(model))


def test_rows_with_images_are_refused() -> None:
    model = small_model()
    rows = rows_of(model)
    rows[0] = dataclasses.replace(rows[0], images=(PlacedImage(Image(b"png"), 0, 1),))
    before = weights(model)
    with pytest.raises(ConfigError, match="text-only models"):
        learn(learner_of(model), rows, constant(rows, [1.0] * len(rows)))
    assert torch.equal(weights(model), before)
