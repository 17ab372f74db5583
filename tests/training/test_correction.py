"""Rollout correction and its metrics: values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentfly.training.config.groups import CorrectionConfig
from agentfly.training.losses.rollout_correction import RolloutCorrection, correct_rollouts, mismatch_metrics

RATIOS = [4.0, 1.0, 0.6, 0.25, 0.25]
ROW = torch.tensor([0, 0, 1, 1, 1])
BEHAVIOUR = torch.full((5,), -2.0, dtype=torch.float64)
OLD = BEHAVIOUR + torch.tensor(RATIOS, dtype=torch.float64).log()
ALL = torch.ones(5, dtype=torch.bool)


def corrected(**config: Any) -> RolloutCorrection:
    return correct_rollouts(OLD, BEHAVIOUR, ALL, ROW, CorrectionConfig(**config))


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"level": "token"}, [2.0, 1.0, 0.6, 0.25, 0.25]),
        ({"level": "token", "lower": 0.4}, [2.0, 1.0, 0.6, 0.4, 0.4]),
        ({"level": "sequence"}, [2.0, 2.0, 0.0375, 0.0375, 0.0375]),
        ({"level": "sequence_mean", "upper": 5.0}, [2.0, 2.0] + [0.0375 ** (1 / 3)] * 3),
    ],
)
def test_truncation_keeps_each_weight_within_its_bounds(config: dict[str, Any], weights: list[float]) -> None:
    result = corrected(**config)
    assert result.weights.tolist() == pytest.approx(weights)
    assert result.mask.all()
    assert result.metrics["mismatch/masked_fraction"] == 0.0


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"level": "token"}, [0.0, 1.0, 0.6, 0.0, 0.0]),
        ({"level": "token", "lower": 0.2}, [0.0, 1.0, 0.6, 0.25, 0.25]),
        ({"level": "sequence", "upper": 4.0}, [4.0, 4.0, 0.0, 0.0, 0.0]),
        ({"level": "sequence_mean", "upper": 3.0, "lower": 0.5}, [2.0, 2.0, 0.0, 0.0, 0.0]),
    ],
)
def test_masking_excludes_tokens_beyond_the_bounds_and_weights_the_others(
    config: dict[str, Any], weights: list[float]
) -> None:
    result = corrected(mode="mask", **config)
    assert result.weights.tolist() == pytest.approx(weights)
    assert result.mask.tolist() == [weight > 0 for weight in weights]


def test_the_metrics_report_masked_fractions_and_extreme_ratios() -> None:
    metrics = corrected(mode="mask").metrics
    assert metrics["mismatch/masked_fraction"] == pytest.approx(3 / 5)
    assert metrics["mismatch/seq_masked_fraction"] == 1.0
    assert metrics["mismatch/ratio_max"] == pytest.approx(4.0)
    assert metrics["mismatch/ratio_mean"] == pytest.approx(6.1 / 5)
    assert metrics["mismatch/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
    assert metrics["mismatch/rollout_is_ratio_fraction_low"] == pytest.approx(2 / 5)
    assert metrics["mismatch/kl"] == pytest.approx(-math.log(4 * 0.6 / 16) / 5)
    assert metrics["mismatch/rollout_ppl"] == pytest.approx(math.exp(2))
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(math.log(4))


def test_without_mismatch_every_weight_is_one_and_every_distance_zero() -> None:
    for level in ("token", "sequence", "sequence_mean"):
        for mode in ("truncate", "mask"):
            result = correct_rollouts(OLD, OLD, ALL, ROW, CorrectionConfig(level=level, mode=mode))
            assert result.weights.tolist() == [1.0] * 5
            assert result.mask.all()
            assert result.metrics["mismatch/kl"] == result.metrics["mismatch/chi2_seq"] == 0.0
            assert result.metrics["mismatch/rollout_is_eff_sample_size"] == 1.0


def test_masked_tokens_affect_no_weight_and_no_metric() -> None:
    mask = torch.tensor([True, True, False, True, False])
    old, behaviour = OLD.clone(), BEHAVIOUR.clone()
    old[2], behaviour[4] = math.nan, -math.inf
    row = torch.tensor([0, 0, 0, 1, 1])
    for level in ("token", "sequence", "sequence_mean"):
        result = correct_rollouts(old, behaviour, mask, row, CorrectionConfig(level=level, upper=9.0))
        expected = correct_rollouts(
            OLD[mask], BEHAVIOUR[mask], mask[mask], row[mask], CorrectionConfig(level=level, upper=9.0)
        )
        assert result.weights[mask].tolist() == expected.weights.tolist()
        assert result.weights[~mask].tolist() == [0.0, 0.0]
        assert result.metrics == expected.metrics


def test_a_batch_without_tokens_has_no_metrics() -> None:
    nothing = torch.zeros(5, dtype=torch.bool)
    result = correct_rollouts(OLD, BEHAVIOUR, nothing, ROW, CorrectionConfig())
    assert result.weights.tolist() == [0.0] * 5
    assert result.metrics == {}


def test_log_probs_at_the_temperature_of_sampling_do_not_mismatch() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    behaviour = (logits / 0.5).log_softmax(-1)[:1]
    one, row = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    assert mismatch_metrics((logits / 0.5).log_softmax(-1)[:1], behaviour, one, row)["mismatch/ratio_max"] == 1.0
    other = mismatch_metrics(logits.log_softmax(-1)[:1], behaviour, one, row)
    assert other["mismatch/kl"] == pytest.approx(-0.143 + 0.408, abs=1e-3)


def test_every_number_is_finite_however_far_apart_the_two_are() -> None:
    old = torch.tensor([-5000.0, -0.1])
    behaviour = torch.tensor([-0.1, -5000.0])
    metrics = correct_rollouts(
        old, behaviour, torch.ones(2, dtype=torch.bool), torch.tensor([0, 1]), CorrectionConfig()
    ).metrics
    assert all(map(math.isfinite, metrics.values())), metrics
