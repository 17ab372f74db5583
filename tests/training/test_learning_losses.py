"""Settings of losses and of rollout correction with a small random model: each has its effect."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.training.losses import LOSSES
from agentfly.training.rows import Row
from tests.training.small_learning import constant, learn, learner_of, rows_of, small_model, weights

JUDGED = [1.0, -1.0, 0.3, 0.5]
UNEVEN = (0.5, 0.9, 0.1)
"""Shifts that differ within a row, so that a token's ratio is not the mean of its row's."""


def sampled_elsewhere(rows: Sequence[Row], *shifts: float) -> list[Row]:
    """Return the rows with lower rollout log-probs in every other row.

    The log-probs of a row's tokens are lower by ``shifts`` in turn.
    """
    return [
        dataclasses.replace(
            row,
            logprobs=[
                logprob - shifts[place % len(shifts)] * (number % 2) for place, logprob in enumerate(row.logprobs)
            ],
        )
        for number, row in enumerate(rows)
    ]


def moved(**settings: Any) -> torch.Tensor:
    """How a step with two updates moves the weights; last the norm of its gradient, which AdamW takes out."""
    model = small_model()
    rows = sampled_elsewhere(rows_of(model), *UNEVEN)
    start = weights(model)
    metrics = learn(learner_of(model, updates_per_step=2, **settings), rows, constant(rows, JUDGED))
    return torch.cat([weights(model) - start, torch.tensor([metrics["policy/grad_norm"]])])


DIFFERENT: list[dict[str, Any]] = [
    {},
    {"loss": "gspo"},
    {"loss": "cispo"},
    {"loss": "policy_gradient"},
    {"clip_dual": 1.01},
    {"aggregation": "sequence_mean"},
    {"aggregation": "sequence_token_mean"},
    {"correction": {}},
    {"correction": {"mode": "mask", "upper": 1.2}},
    {"correction": {"level": "sequence"}},
    {"correction": {"level": "sequence_mean"}},
    {"kl": {"coefficient": 0.5}},
    {"kl": {"coefficient": 0.5, "gradient": "k2"}},
    {"kl": {"coefficient": 0.5, "estimator": "full"}},
]


def test_each_setting_of_the_loss_changes_the_update() -> None:
    updates: list[torch.Tensor] = []
    for settings in DIFFERENT:
        update = moved(learning_rate=0.02, **settings)
        same = [
            DIFFERENT[number]
            for number, other in enumerate(updates)
            if (update - other).norm() < 0.02 * other.norm()  # the nearest two are 0.09 apart, and rounding is 1e-6
        ]
        assert not same, f"{settings} does what {same} does"
        updates.append(update)


def test_the_longest_row_scales_the_constant_aggregation() -> None:
    model = small_model()
    rows = rows_of(model)
    norms = {}
    for tokens in (8, 16):
        learner = learner_of(copy.deepcopy(model), aggregation="constant", aggregation_tokens=tokens)
        norms[tokens] = learn(learner, rows, constant(rows, JUDGED))["policy/grad_norm"]
    assert norms[8] == pytest.approx(2 * norms[16], rel=1e-3)


def test_with_rollout_correction_the_ratio_starts_at_one_for_any_rollout_log_probs() -> None:
    model = small_model()
    rows = sampled_elsewhere(rows_of(model), 0.5)
    plain = learn(learner_of(copy.deepcopy(model)), rows, constant(rows, JUDGED))
    corrected = learn(learner_of(model, correction={"upper": 1.2}), rows, constant(rows, JUDGED))
    assert plain["policy/ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-4)
    assert corrected["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert corrected["mismatch/ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-4)
    assert corrected["mismatch/rollout_is_max"] == pytest.approx(1.2)
    for name in ("kl", "k3_kl", "ratio_mean", "rollout_ppl", "training_ppl", "chi2_seq"):
        assert corrected[f"mismatch/{name}"] == pytest.approx(plain[f"mismatch/{name}"], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_the_first_update_under_correction_clips_nothing_in_any_format(loss: str, dtype: torch.dtype) -> None:
    """The bounds are as narrow as in GSPO, micro-batches round differently, and the rollout log-probs differ much."""
    model = small_model(dtype)
    rows = sampled_elsewhere(rows_of(model), *UNEVEN)
    narrow = {"clip_low": 0.0003, "clip_high": 0.0004} if LOSSES[loss].uses else {}
    settings: dict[str, Any] = {"loss": loss, "micro_batch_tokens": 10, **narrow}
    plain = learn(learner_of(copy.deepcopy(model), **settings), rows, constant(rows, [1.0, 1.0, -1.0, -1.0]))
    found = learn(learner_of(model, correction={}, **settings), rows, constant(rows, [1.0, 0.0, -1.0, 0.0]))
    assert (found["policy/ratio_max"], found["policy/clip_fraction"]) == (1.0, 0.0)
    assert found["mismatch/logprob_diff_mean"] > 0.1
    assert (plain["policy/clip_fraction_first"] > 0.1) == bool(narrow)
    assert plain["policy/clip_fraction_first"] == plain["policy/clip_fraction"]


def test_clipping_by_rounding_is_reported_in_formats_where_it_recurs() -> None:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(dtype)
        rows = sampled_elsewhere(rows_of(model), 0.01)
        settings: dict[str, Any] = {"loss": "gspo", "clip_low": 0.0003, "clip_high": 0.0004, "correction": {}}
        found[dtype] = learn(learner_of(model, **settings), rows, constant(rows, [1.0, 1.0, -1.0, -1.0]))
    assert found[torch.float32]["policy/clip_fraction_first"] == 0.0
    assert found[torch.bfloat16]["policy/clip_fraction_first"] > 0.1


def test_rows_that_correction_leaves_out_teach_nothing_and_count_nowhere() -> None:
    rows = sampled_elsewhere(rows_of(small_model()), 3.0)
    ends, norms = [], []
    for kept in ([0, 1, 2, 3], [0, 2]):
        model, some = small_model(), [rows[index] for index in kept]
        judged = constant(some, [JUDGED[index] for index in kept])
        start = weights(model)
        learner = learner_of(model, correction={"mode": "mask", "upper": 1.5}, aggregation="sequence_token_mean")
        metrics = learn(learner, some, judged)
        assert metrics["mismatch/seq_masked_fraction"] == (0.5 if len(kept) == 4 else 0.0)
        ends.append(weights(model) - start)
        norms.append(metrics["policy/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert (ends[0] - ends[1]).norm() < 0.01 * ends[1].norm()
