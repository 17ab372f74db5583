"""The KL penalty, in the loss and in the reward."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.policies.embedded import scoring
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs, Advantages
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.learning import kl_penalty as penalty_module
from tests.training.small_learning import constant, learn, learner_of, rows_of, small_model, weights


def moved(model: torch.nn.Module, by: float = 0.02) -> None:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by * torch.randn(weight.shape, generator=draw))


def all_logprobs(model: torch.nn.Module, ids: list[int], positions: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    return (logits[torch.tensor(positions) - 1] / temperature).log_softmax(dim=-1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_variance", "full"])
def test_each_estimator_in_the_reward_matches_its_formula(estimator: str) -> None:
    model = small_model()
    settings: dict[str, Any] = {"kl": {"coefficient": 0.5, "estimator": estimator, "where": "reward"}}
    learner = learner_of(model, 0.7, **settings)
    before = copy.deepcopy(model)
    moved(model)
    rows = rows_of(model, 0.7)
    found = learner.score(rows).token_rewards
    assert found is not None
    for row, values in zip(rows, found, strict=True):
        own, other = (all_logprobs(each, list(row.ids), row.targets, 0.7) for each in (model, before))
        tokens = torch.tensor([row.ids[position] for position in row.targets])[:, None]
        difference = (own - other).gather(1, tokens)[:, 0]
        expected = {
            "k1": difference,
            "k2": difference.square() / 2,
            "k3": (-difference).exp() - 1 + difference,
            "low_variance": ((-difference).exp() - 1 + difference).clamp(max=10.0),
            "full": (own.exp() * (own - other)).sum(dim=-1),
        }[estimator]
        assert values.tolist() == pytest.approx((-0.5 * expected).tolist(), rel=1e-5, abs=2e-5)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
@pytest.mark.parametrize(
    "kl", [{"estimator": "k2"}, {"estimator": "k3"}, {"estimator": "full"}, {"estimator": "k1", "gradient": "k2"}]
)
def test_in_the_loss_it_pulls_back_to_the_policy_before_training(kl: dict[str, Any], lora: dict[str, Any]) -> None:
    model = small_model()
    learner = learner_of(model, lora=lora, kl={"coefficient": 10.0, **kl}, learning_rate=2e-3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if lora is None or "lora_B" in name:
                weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    rows = rows_of(model)
    nothing = constant(rows, [0.0] * 4)
    measured = [abs(learn(learner, rows, nothing)["policy/reference_kl"]) for _ in range(6)]
    assert measured[0] > 1e-4
    assert measured[-1] < measured[0]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["all weights", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kl",
    [
        {"estimator": "k1", "where": "reward"},
        {"estimator": "k3", "where": "reward"},
        {"estimator": "full", "where": "reward"},
        {"estimator": "k1", "gradient": "k2"},
        {"estimator": "k2"},
        {"estimator": "k3"},
        {"estimator": "full"},
    ],
)
def test_a_policy_that_is_the_reference_is_neither_punished_nor_moved_whatever_rounds(
    kl: dict[str, Any], dtype: torch.dtype, lora: dict[str, Any] | None
) -> None:
    """The sampler rounds differently from the trainer, and AdamW turns any gradient into a full step."""
    model = small_model(dtype)
    rows = [
        dataclasses.replace(row, logprobs=[value + 0.01 * (-1) ** place for place, value in enumerate(row.logprobs)])
        for row in rows_of(model)
    ]
    learner = learner_of(model, lora=lora, kl={"coefficient": 0.5, **kl}, micro_batch_tokens=15)
    start = weights(model)
    scores = learner.score(rows)
    evidence = AdvantageInputs(
        [dataclasses.replace(row, reward=0.0) for row in rows], token_rewards=scores.token_rewards
    )
    for algorithm in ("grpo", "reinforce_plus_plus"):
        advantages = ALGORITHMS[algorithm].estimate(evidence, AdvantageConfig())
        assert learner.learn(rows, advantages, scores)["policy/grad_norm"] == 0.0
    assert torch.equal(weights(model), start)


def test_the_full_divergence_makes_its_logits_in_chunks_and_gives_the_same_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = []
    for chunk in (scoring.CHUNK_LOGITS, 80):  # two tokens of a vocabulary of 40
        monkeypatch.setattr(penalty_module, "CHUNK_LOGITS", chunk)
        model = small_model()
        rows = rows_of(model)
        learner = learner_of(model, kl={"coefficient": 1.0, "estimator": "full"})
        moved(model)
        learn(learner, rows, constant(rows, [1.0, -1.0, 0.0, 0.0]))
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=1e-5)


def test_in_the_reward_it_has_no_gradient_of_its_own() -> None:
    model = small_model()
    learner = learner_of(model, kl={"coefficient": 10.0, "where": "reward"})
    moved(model)
    rows = rows_of(model)
    before = weights(model)
    metrics = learn(learner, rows, constant(rows, [0.0] * 4))
    assert torch.equal(weights(model), before)
    scores = learner.score(rows)
    assert scores.token_rewards is not None
    mean = -np.concatenate(scores.token_rewards).mean() / 10.0
    assert metrics["policy/reference_kl"] == pytest.approx(mean)
    assert mean > 1e-3


@pytest.mark.parametrize(("target", "grows"), [(1e-6, True), (1e3, False)])
def test_an_adaptive_coefficient_follows_the_divergence_and_is_resumed(target: float, grows: bool) -> None:
    settings: dict[str, Any] = {"kl": {"coefficient": 0.1, "target_nats": target, "horizon_rows": 8}}
    model = small_model()
    learner = learner_of(model, **settings)
    moved(model)
    rows = rows_of(model)
    for _ in range(2):
        last = learn(learner, rows, constant(rows, [1, -1, 1, -1]))
    assert last["policy/kl_coefficient"] == pytest.approx(0.1 * (1.1 if grows else 0.9))
    other = small_model()
    resumed = learner_of(other, **settings)
    other.load_state_dict(model.state_dict())
    resumed.load_state(learner.state())
    again = learn(resumed, rows, constant(rows, [1, -1, 1, -1]))
    assert again["policy/kl_coefficient"] == pytest.approx(0.1 * (1.1 if grows else 0.9) ** 2)


def test_without_a_coefficient_no_reference_is_kept_or_asked() -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model)
    scores = learner.score(rows)
    assert scores.token_rewards is None
    metrics = learner.learn(rows, Advantages(constant(rows, [1.0] * 4)), scores)
    assert "policy/reference_kl" not in metrics
