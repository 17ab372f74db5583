"""Advantages against verl's own functions, on random batches, where verl has the algorithm.

verl lays a trajectory out as one padded row of responses, ours may be split into several. It adds small numbers where
it divides (1e-6 to a standard deviation, 1e-8 to a variance), and ours adds none, so rewards are whole numbers here:
beside what they differ by, that is nothing. Groups of one, in which verl takes the reward itself for the advantage, are
looked at elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfly.training.advantages import ALGORITHMS, AdvantageInputs, Advantages
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row, RowTurn

pytestmark = pytest.mark.slow  # the import of verl is

LENGTH = 12
with_verl = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass
class Batch:
    """A batch both ways: as rows, and as verl's tensors of shape [trajectories, LENGTH]."""

    evidence: AdvantageInputs
    mask: torch.Tensor
    rewards: torch.Tensor
    values: torch.Tensor
    baselines: torch.Tensor
    index: np.ndarray
    places: list[list[tuple[int, int]]]

    def laid_out(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Arrays of rows as one of shape [trajectories, LENGTH], 0 where no token was sampled."""
        out = np.zeros(tuple(self.mask.shape))
        for array, places in zip(arrays, self.places, strict=True):
            assert len(array) == len(places)
            for value, place in zip(array, places, strict=True):
                out[place] = value
        return out

    def compare(self, advantages: Advantages, expected: torch.Tensor) -> None:
        masked = expected.numpy() * self.mask.numpy()
        np.testing.assert_allclose(self.laid_out(advantages.values), masked, rtol=1e-5, atol=1e-5)


@st.composite
def batches(draw: st.DrawFn, *, token_rewards: bool = True) -> Batch:
    """Two to five attempts at each of up to four tasks, each of one row or split into two between its turns."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    count = sum(sizes)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.random((count, LENGTH)) < 0.6
    mask[:, random.integers(0, LENGTH)] = True
    outcomes = np.array(draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count)), float)
    own = np.where(mask, random.normal(size=mask.shape), 0.0) * token_rewards
    values = random.normal(size=mask.shape)
    index = np.repeat(np.arange(len(sizes)), sizes)
    baselines = random.normal(size=len(sizes))
    rows, places = [], []
    for number in range(count):
        cut = int(random.integers(0, LENGTH)) if draw(st.booleans()) else 0
        for turn, (start, stop) in enumerate(((0, cut), (cut, LENGTH))):
            if mask[number, start:stop].any():
                rows.append(row(mask[number, start:stop], str(index[number]), str(number), outcomes[number], turn))
                places.append([(number, place) for place in range(start, stop) if mask[number, place]])
    order = random.permutation(len(rows))
    rows, places = [rows[place] for place in order], [places[place] for place in order]
    last = [int(np.flatnonzero(one)[-1]) for one in mask]
    rewards = own.copy()
    rewards[np.arange(count), last] += outcomes
    return Batch(
        evidence=AdvantageInputs(
            rows=rows,
            values=[np.array([values[place] for place in one]) for one in places],
            token_rewards=[np.array([own[place] for place in one]) for one in places] if token_rewards else None,
            baselines={str(group): float(value) for group, value in enumerate(baselines)},
        ),
        mask=torch.tensor(mask, dtype=torch.float64),
        rewards=torch.tensor(rewards),
        values=torch.tensor(values),
        baselines=torch.tensor(baselines[index]),
        index=index,
        places=places,
    )


def row(mask: np.ndarray, group: str, rollout: str, reward: float, turn: int) -> Row:
    length = len(mask)
    return Row(
        ids=[7] * length,
        loss_mask=mask.astype(int).tolist(),
        logprobs=[-0.5 if sampled else math.nan for sampled in mask],
        versions=[0 if sampled else -1 for sampled in mask],
        group_id=group,
        rollout_id=rollout,
        reward=float(reward),
        truncated=False,
        turns=(RowTurn(turn, 0, length),),
    )


def ours(name: str, batch: Batch, **config: Any) -> Advantages:
    return ALGORITHMS[name].estimate(batch.evidence, AdvantageConfig(**config))


@with_verl
@given(batches())
@pytest.mark.parametrize(
    ("name", "function", "arguments"),
    [
        ("dr_grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("dr_grpo", "compute_grpo_vectorized_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "compute_rloo_outcome_advantage", {}),
        ("rloo", "compute_rloo_vectorized_outcome_advantage", {}),
        ("opo", "compute_opo_outcome_advantage", {}),
    ],
)
def test_outcome_estimators_agree_with_verls(
    verl_algorithms: ModuleType, name: str, function: str, arguments: dict[str, Any], batch: Batch
) -> None:
    expected, _ = getattr(verl_algorithms, function)(batch.rewards.clone(), batch.mask, batch.index, **arguments)
    batch.compare(ours(name, batch), expected)


@with_verl
@given(batches(token_rewards=False))
@pytest.mark.parametrize("function", ["compute_grpo_outcome_advantage", "compute_grpo_vectorized_outcome_advantage"])
def test_grpo_agrees_with_verls(verl_algorithms: ModuleType, function: str, batch: Batch) -> None:
    estimate = getattr(verl_algorithms, function)
    expected, _ = estimate(batch.rewards.clone(), batch.mask, batch.index)
    batch.compare(ours("grpo", batch), expected)


@with_verl
@given(batches(), st.sampled_from([1.0, 0.9, 0.0]))
def test_reinforce_plus_plus_agrees_with_verls(verl_algorithms: ModuleType, batch: Batch, discount: float) -> None:
    config = SimpleNamespace(gamma=discount)
    estimate = verl_algorithms.compute_reinforce_plus_plus_outcome_advantage
    expected, _ = estimate(batch.rewards.clone(), batch.mask, config=config)
    batch.compare(ours("reinforce_plus_plus", batch, discount=discount), expected)


@with_verl
@given(batches(token_rewards=False))
def test_reinforce_plus_plus_with_a_baseline_agrees_with_verls(verl_algorithms: ModuleType, batch: Batch) -> None:
    estimate = verl_algorithms.compute_reinforce_plus_plus_baseline_outcome_advantage
    expected, _ = estimate(batch.rewards.clone(), batch.mask, batch.index)
    batch.compare(ours("reinforce_plus_plus_baseline", batch), expected)


@with_verl
@given(batches())
def test_remax_agrees_with_verls(verl_algorithms: ModuleType, batch: Batch) -> None:
    estimate = verl_algorithms.compute_remax_outcome_advantage
    expected, _ = estimate(batch.rewards.clone(), batch.baselines, batch.mask)
    batch.compare(ours("remax", batch), expected)


@with_verl
@given(batches(), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_and_its_returns_agree_with_verls(
    verl_algorithms: ModuleType, batch: Batch, discount: float, gae_lambda: float
) -> None:
    estimate = verl_algorithms.compute_gae_advantage_return
    expected, returns = estimate(batch.rewards.clone(), batch.values, batch.mask, discount, gae_lambda)
    found = ours("gae", batch, discount=discount, gae_lambda=gae_lambda)
    batch.compare(found, expected)
    assert found.returns is not None
    np.testing.assert_allclose(
        batch.laid_out(found.returns), returns.numpy() * batch.mask.numpy(), rtol=1e-5, atol=1e-5
    )
