"""Losses, aggregation, divergences, value loss and rollout correction: values and gradients equal verl's."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentfly.training.config.groups import CorrectionConfig
from agentfly.training.losses import LOSSES
from agentfly.training.losses.aggregation import Aggregation, AggregationName, ClipRange, TokenBatch
from agentfly.training.losses.kl import AdaptiveKLController, SampledEstimator, kl_estimate, with_k2_gradient
from agentfly.training.losses.policy_losses import value_loss
from agentfly.training.losses.rollout_correction import correct_rollouts, mismatch_metrics

pytestmark = pytest.mark.slow  # the import of verl is

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
SLOT_WIDTH = 6
verl_name: dict[AggregationName, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-sum",
    "sequence_token_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


@pytest.fixture(scope="session")
def verl_correction(verl_algorithms: ModuleType) -> ModuleType:
    return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


class Grid:
    """Random numbers for rows of different lengths, as verl has them: padded to one width."""

    def __init__(self, seed: int, lengths: list[int]) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._shape = (len(lengths), SLOT_WIDTH)
        self.bool_mask = torch.arange(SLOT_WIDTH)[None] < torch.tensor(lengths)[:, None]
        self.mask = self.bool_mask.double()
        self.row = torch.arange(len(lengths))[:, None].expand(self._shape).reshape(-1)
        self.tokens, self.rows = sum(lengths), len(lengths)

    def normal(self, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(self._shape, generator=self._random, dtype=torch.float64)

    def logprobs(self) -> Tensor:
        return -self.normal().abs() - 0.01

    def aggregation(self, name: AggregationName) -> Aggregation:
        return Aggregation(name, tokens=self.tokens, rows=self.rows, row_tokens=SLOT_WIDTH)


def flat(*tensors: Tensor) -> list[Tensor]:
    return [tensor.reshape(-1) for tensor in tensors]


def value_and_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    at = at.detach().clone().requires_grad_()
    value = loss(at)
    (gradient,) = torch.autograd.grad(value.sum(), at)
    return value.detach(), gradient


def assert_same(mine: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], at: Tensor) -> None:
    for ours, expected in zip(value_and_gradient(mine, at), value_and_gradient(theirs, at), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


grids = st.builds(Grid, st.integers(0, 2**32), st.lists(st.integers(1, SLOT_WIDTH), min_size=1, max_size=4))
spreads = st.sampled_from([0.01, 0.3, 2.0])
aggregations = st.sampled_from(sorted(verl_name))
many = settings(deadline=None, max_examples=30)


@many
@given(
    grid=grids,
    aggregation=aggregations,
    loss=st.sampled_from([("ppo_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")]),
    clip=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 5.0)),
    dual=st.none() | st.floats(1.1, 6.0),
    spread=spreads,
)
def test_policy_losses(
    verl_algorithms: ModuleType,
    grid: Grid,
    aggregation: AggregationName,
    loss: tuple[str, str],
    clip: tuple[float, float],
    dual: float | None,
    spread: float,
) -> None:
    name, theirs = loss
    dual = dual if name == "ppo_clip" else None
    actor = importlib.import_module("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        clip_ratio_c=dual or 1e300,
    )
    old, advantages, weights = grid.logprobs(), grid.normal(), grid.normal().exp()

    def mine(logprobs: Tensor) -> Tensor:
        batch = TokenBatch(*flat(logprobs, old, advantages, grid.bool_mask), grid.row, weights.reshape(-1))  # type: ignore[call-arg]
        result = LOSSES[name](batch, ClipRange(*clip, dual))
        return grid.aggregation(aggregation)(result.loss * batch.weights, batch.mask, batch.row)

    def verl(logprobs: Tensor) -> Tensor:
        return verl_algorithms.get_policy_loss_fn(theirs)(
            old, logprobs, advantages, grid.mask, verl_name[aggregation], actor, weights
        )[0]

    assert_same(mine, verl, old + grid.normal(spread))


@many
@given(grid=grids, spread=spreads)
def test_the_policy_gradient_equals_weighted_reinforce(verl_algorithms: ModuleType, grid: Grid, spread: float) -> None:
    old, advantages = grid.logprobs(), grid.normal()
    at = old + grid.normal(spread)
    actor = importlib.import_module("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1
    )

    def mine(logprobs: Tensor) -> Tensor:
        batch = TokenBatch(*flat(logprobs, old, advantages, grid.bool_mask), grid.row, torch.ones_like(grid.row))  # type: ignore[call-arg]
        loss = LOSSES["policy_gradient"](batch, ClipRange(0.2, 0.2)).loss
        return grid.aggregation("token_mean")(loss, batch.mask, batch.row)

    def verl(logprobs: Tensor) -> Tensor:
        return verl_algorithms.compute_policy_loss_reinforce(
            old, logprobs, advantages, grid.mask, "token-mean", actor, (at - old).exp()
        )[0]

    torch.testing.assert_close(value_and_gradient(mine, at)[1], value_and_gradient(verl, at)[1], **CLOSE)


@many
@given(grid=grids, name=aggregations)
def test_aggregation(verl_algorithms: ModuleType, grid: Grid, name: AggregationName) -> None:
    def mine(values: Tensor) -> Tensor:
        return grid.aggregation(name)(*flat(values, grid.bool_mask), grid.row)  # type: ignore[call-arg]

    assert_same(mine, lambda values: verl_algorithms.agg_loss(values, grid.mask, verl_name[name]), grid.normal())


@many
@given(grid=grids, kind=st.sampled_from(["k1", "k2", "k3", "low_variance"]), plus=st.booleans(), spread=spreads)
def test_divergence(verl_algorithms: ModuleType, grid: Grid, kind: SampledEstimator, plus: bool, spread: float) -> None:
    reference = grid.logprobs()
    at = reference + grid.normal(spread)
    theirs = {"low_variance": "low_var_kl"}.get(kind, kind) + "+" * plus
    assume(kind != "k3" or bool((kl_estimate("k3", at, reference, grid.bool_mask) < 10).all()))

    def mine(logprobs: Tensor) -> Tensor:
        values = kl_estimate(kind, logprobs, reference, grid.bool_mask)
        return with_k2_gradient(values, logprobs, reference, grid.bool_mask) if plus else values

    assert_same(mine, lambda logprobs: verl_algorithms.kl_penalty(logprobs, reference, theirs) * grid.mask, at)


def test_low_variance_is_bounded_where_it_is_in_verl(verl_algorithms: ModuleType) -> None:
    logprobs, reference = torch.tensor([-30.0, -4.0, -0.1]), torch.tensor([-0.1, -0.5, -40.0])
    theirs = verl_algorithms.kl_penalty(logprobs, reference, "low_var_kl")
    assert theirs.max() == 10.0
    mask = torch.ones(3, dtype=torch.bool)
    mine = kl_estimate("low_variance", logprobs, reference, mask)
    torch.testing.assert_close(mine, theirs)


@many
@given(
    start=st.floats(1e-4, 10.0),
    target=st.floats(1e-3, 10.0),
    steps=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 500)), max_size=6),
)
def test_the_adaptive_coefficient(
    verl_algorithms: ModuleType, start: float, target: float, steps: list[tuple[float, int]]
) -> None:
    theirs = verl_algorithms.AdaptiveKLController(start, target, 500)
    mine = AdaptiveKLController(start, target, 500)
    for seen, rows in steps:
        theirs.update(seen, rows)
        mine = mine.updated(seen, rows)
    assert mine.value == pytest.approx(theirs.value)


@many
@given(grid=grids, aggregation=aggregations, clip=st.floats(0.01, 3.0))
def test_value_loss(verl_algorithms: ModuleType, grid: Grid, aggregation: AggregationName, clip: float) -> None:
    old, returns = grid.normal(), grid.normal(2.0)

    def mine(values: Tensor) -> Tensor:
        loss = value_loss(values, old, returns, grid.bool_mask, clip).loss
        return grid.aggregation(aggregation)(*flat(loss, grid.bool_mask), grid.row)  # type: ignore[call-arg]

    def verl(values: Tensor) -> Tensor:
        return verl_algorithms.compute_value_loss(values, returns, old, grid.mask, clip, verl_name[aggregation])[0]

    assert_same(mine, verl, old + grid.normal())


@many
@given(grid=grids, spread=spreads)
@example(grid=Grid(0, [1]), spread=0.01)
def test_mismatch_metrics(verl_correction: ModuleType, grid: Grid, spread: float) -> None:
    behaviour = grid.logprobs()
    old = behaviour + grid.normal(spread)
    theirs = verl_correction.compute_offpolicy_metrics(old, behaviour, grid.mask)
    mine = mismatch_metrics(*flat(old, behaviour, grid.bool_mask), grid.row)  # type: ignore[call-arg]
    shared = [name for name in theirs if f"mismatch/{name}" in mine]
    assert len(shared) >= 9
    for name in shared:
        assert mine[f"mismatch/{name}"] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def corrected(grid: Grid, old: Tensor, behaviour: Tensor, **config: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    result = correct_rollouts(*flat(old, behaviour, grid.bool_mask), grid.row, CorrectionConfig(**config))  # type: ignore[arg-type, call-arg]
    shape = grid.mask.shape
    return result.weights.reshape(shape), result.mask.reshape(shape), result.metrics


@many
@given(
    grid=grids,
    level=st.sampled_from(["token", "sequence"]),
    bounds=st.tuples(st.floats(0.1, 0.9), st.floats(1.0, 4.0)),
    mode=st.sampled_from(["truncate", "mask"]),
    spread=spreads,
)
def test_weights_of_rollout_correction(
    verl_correction: ModuleType,
    grid: Grid,
    level: Literal["token", "sequence"],
    bounds: tuple[float, float],
    mode: Literal["truncate", "mask"],
    spread: float,
) -> None:
    lower, upper = bounds
    behaviour = grid.logprobs()
    old = behaviour + grid.normal(spread)
    threshold: str | float = f"{lower}_{upper}" if mode == "mask" else upper
    weights, mask, metrics = corrected(
        grid, old, behaviour, level=level, mode=mode, upper=upper, lower=lower if mode == "mask" else None
    )
    assume(bool(weights.any()))  # verl divides by 0 where nothing is left
    theirs, names = verl_correction.compute_rollout_correction_weights(old - behaviour, grid.mask, level, threshold)
    torch.testing.assert_close(weights, theirs, **CLOSE)
    if mode == "mask":
        assert torch.equal(mask, theirs > 0)
        assert metrics["mismatch/masked_fraction"] == pytest.approx(names["rollout_is_oob_ratio"], abs=1e-6)
    else:
        assert torch.equal(mask, grid.bool_mask)
    same = ["mean", "std", "eff_sample_size"]
    if level == "token":  # of rows, verl tells the extremes before they are bounded, and shares of rows
        same += ["max", "min", "ratio_fraction_high", "ratio_fraction_low"]
    for name in same:
        tolerance = 1e-3 if name == "std" else 1e-6  # verl's is a difference of two means, with a small addition
        assert metrics[f"mismatch/rollout_is_{name}"] == pytest.approx(names[f"rollout_is_{name}"], abs=tolerance), name


@many
@given(
    grid=grids,
    kind=st.sampled_from([("token", "token_k1"), ("sequence", "seq_sum_k1"), ("sequence_mean", "seq_mean_k1")]),
    upper=st.floats(1.0, 4.0),
    spread=spreads,
)
def test_rollout_correction_masks_the_same_tokens_as_verl(
    verl_correction: ModuleType, grid: Grid, kind: tuple[str, str], upper: float, spread: float
) -> None:
    level, theirs = kind
    behaviour = grid.logprobs()
    old = behaviour + grid.normal(spread)
    kept, names = verl_correction.compute_rollout_rejection_mask(old - behaviour, grid.mask, theirs, upper)
    _, mask, metrics = corrected(grid, old, behaviour, level=level, mode="mask", upper=upper)
    assert torch.equal(mask, kept.bool())
    assert metrics["mismatch/masked_fraction"] == pytest.approx(names["rollout_rs_masked_fraction"], abs=1e-6)
    expected = names["rollout_rs_seq_masked_fraction"]
    assert metrics["mismatch/seq_masked_fraction"] == pytest.approx(expected, abs=1e-6)


def test_entropy_of_the_aggregated_tokens(verl_algorithms: ModuleType) -> None:
    grid = Grid(0, [2, 6, 1])
    logits = torch.randn(3, SLOT_WIDTH, 11, dtype=torch.float64)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    for name, theirs in verl_name.items():
        mine = grid.aggregation(name)(*flat(entropy, grid.bool_mask), grid.row)  # type: ignore[call-arg]
        expected = verl_algorithms.compute_entropy_loss(logits, grid.mask, theirs)
        assert mine.item() == pytest.approx(expected.item(), rel=1e-5)
        assert math.isfinite(mine.item())
