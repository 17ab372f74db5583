"""An update does not depend on micro-batches, the order of rows, or what is kept in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from agentfly.training.advantages import Advantages
from agentfly.training.rows import Row
from tests.training.small_learning import learner_of, rows_of, small_model, weights

PLAIN: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = {
    "entropy_coefficient": 0.1,
    "kl": {"coefficient": 0.1, "estimator": "low_variance"},
    "correction": {"level": "sequence_mean"},
    "aggregation": "sequence_token_mean",
}
FULL: dict[str, Any] = {"kl": {"coefficient": 0.1, "estimator": "full"}, "loss": "gspo"}
ADAPTERS: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}, "kl": {"coefficient": 0.1, "estimator": "full"}}
CRITIC: dict[str, Any] = {"needs_critic": True, "critic": {"learning_rate": 1e-3}, "aggregation": "sequence_mean"}


def batch_of(model: LlamaForCausalLM) -> tuple[list[Row], list[np.ndarray]]:
    """Return rows with varying advantages and slightly different rollout log-probs. Two rows have a common prefix."""
    rows = rows_of(model)
    twin = dataclasses.replace(rows[1], ids=[*rows[1].ids[:6], 7, 8, 9], rollout_id="twin")
    draw = np.random.default_rng(5)
    off = [
        dataclasses.replace(
            row, logprobs=[value if math.isnan(value) else value + 0.1 * draw.normal() for value in row.logprobs]
        )
        for row in [*rows, twin]
    ]
    return off, [draw.normal(size=len(row.targets)) for row in off]


def updated(
    rows: Sequence[Row], values: Sequence[np.ndarray], *, needs_critic: bool = False, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """Where a step from the same weights leads to, and its metrics."""
    model = small_model()
    learner = learner_of(model, needs_critic=needs_critic, **settings)
    scores = learner.score(rows)
    returns = [value + 1.0 for value in values] if needs_critic else None
    metrics = learner.learn(rows, Advantages(list(values), returns), scores)
    state = learner.state()["critic"]
    critic = [] if state is None else [weight.flatten() for weight in state["decoder"].values()]
    return torch.cat([weights(model), *critic]), metrics


@pytest.mark.parametrize("settings", [PLAIN, EVERYTHING, FULL, ADAPTERS, CRITIC])
@pytest.mark.parametrize(
    "how", ["a row at a time", "three parts", "another order", "checkpointed activations", "rows that teach nothing"]
)
def test_an_update_is_the_same(settings: dict[str, Any], how: str) -> None:
    rows, values = batch_of(small_model())
    expected, metrics = updated(rows, values, **settings)
    changed = dict(settings)
    if how == "a row at a time":
        changed["micro_batch_tokens"] = 1
    elif how == "three parts":
        changed["micro_batch_tokens"] = 15
    elif how == "checkpointed activations":
        changed["gradient_checkpointing"] = True
    elif how == "another order":
        rows, values = rows[::-1], values[::-1]
    else:
        prompt = dataclasses.replace(rows[0], loss_mask=[0] * len(rows[0].ids), rollout_id="silent")
        rows, values = [*rows, prompt], [*values, np.zeros(0)]
    found, found_metrics = updated(rows, values, **changed)
    moved = (expected - updated([], [], **settings)[0]).norm()
    assert moved > 0
    assert (found - expected).norm() < 0.01 * moved
    assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-4)


def test_the_ratio_of_tokens_sampled_by_these_very_weights_is_one_at_any_temperature() -> None:
    for settings in (PLAIN, ADAPTERS):
        for temperature in (1.0, 0.5):
            model = small_model()
            rows = rows_of(model, temperature)
            learner = learner_of(model, temperature, **settings)
            values = [np.ones(len(row.targets)) for row in rows]
            metrics = learner.learn(rows, Advantages(values), learner.score(rows))
            assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
            assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
            assert metrics["mismatch/logprob_diff_max"] < 1e-5
