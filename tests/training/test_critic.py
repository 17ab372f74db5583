"""The critic: the positions of its values, its learning, and resuming."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs, Advantages
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.critic import Critic, explained_variance
from agentfly.training.learning.learner import Learner
from agentfly.training.rows import Row
from agentfly.training.trainer import Trainer
from tests.training.small_learning import constant, learner_of, rows_of, small_model, weights


def critic_of(model: torch.nn.Module, **settings: Any) -> Critic:
    return Critic(model, TrainConfig(algorithm="gae", critic={"learning_rate": 3e-3, "clip_value": None, **settings}))  # type: ignore[arg-type]


def step(learner: Learner, rows: list[Row]) -> dict[str, float]:
    scores = learner.score(rows)
    evidence = AdvantageInputs(rows, values=scores.values, token_rewards=scores.token_rewards)
    return learner.learn(rows, ALGORITHMS["gae"].estimate(evidence, AdvantageConfig()), scores)


def test_a_value_belongs_to_the_state_before_its_token_and_knows_nothing_of_the_choice() -> None:
    model = small_model()
    critic = critic_of(model)
    rows = rows_of(model)
    returns = constant(rows, [1.0, 0.0, 1.0, 0.0])
    critic.learn(rows, critic.score(rows), returns, "0")  # else all values are 0
    row = rows[1]
    place = row.targets[1]
    ids = list(row.ids)
    ids[place] = ids[place] % 39 + 1
    before, after = critic.score([row])[0], critic.score([dataclasses.replace(row, ids=ids)])[0]
    assert before[:2].tolist() == pytest.approx(after[:2].tolist(), abs=1e-6)
    assert before[2:].tolist() != pytest.approx(after[2:].tolist(), abs=1e-6)


def test_values_approach_their_targets_and_the_policy_does_not_change() -> None:
    model = small_model()
    critic = critic_of(model)
    rows = rows_of(model)
    returns = constant(rows, [1.0, -1.0, 0.5, 0.0])
    before = weights(model)
    assert np.concatenate(critic.score(rows)).tolist() == [0.0] * sum(len(row.targets) for row in rows)
    explained = [critic.learn(rows, critic.score(rows), returns, str(number)) for number in range(40)]
    assert explained[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert explained[-1]["critic/explained_variance"] > 0.9
    assert explained[-1]["critic/loss"] < 0.1 * explained[0]["critic/loss"]
    assert torch.equal(weights(model), before)


def test_values_that_may_not_move_far_stop_pushing_once_they_have() -> None:
    rows = rows_of(small_model())
    ends = []
    for clip in (None, 0.05):
        critic = critic_of(small_model(), clip_value=clip, updates_per_step=30)
        metrics = critic.learn(rows, critic.score(rows), constant(rows, [5.0] * 4), "0")
        ends.append(float(np.concatenate(critic.score(rows)).mean()))
    assert metrics["critic/clip_fraction"] > 0.3
    assert 0.05 < ends[1] < 0.5 * ends[0]


def test_only_the_critic_learns_during_its_warm_up() -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model, needs_critic=True, algorithm="gae", critic={"warmup_steps": 2, "learning_rate": 1e-3})
    before = weights(model)
    for _ in range(2):
        metrics = step(learner, rows)
        assert metrics["policy/updates"] == 0
        assert metrics["critic/grad_norm"] > 0
    assert torch.equal(weights(model), before)
    assert step(learner, rows)["policy/updates"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_with_a_critic_resumes_exactly_from_its_state(dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {
        "algorithm": "gae",
        "critic": {"learning_rate": 1e-3, "updates_per_step": 2},
        "mini_batches": 2,
    }
    model = small_model(dtype)
    rows = rows_of(model)
    learner = learner_of(model, needs_critic=True, **settings)
    for _ in range(2):
        step(learner, rows)
    other = small_model(dtype)
    resumed = learner_of(other, needs_critic=True, **settings)
    other.load_state_dict(model.state_dict())
    resumed.load_state(copy.deepcopy(learner.state()))
    for _ in range(2):
        assert step(resumed, rows) == step(learner, rows)
    assert torch.equal(weights(other), weights(model))


def test_explained_variance_compares_returns_with_values() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 3.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) == 0.0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0


def test_a_batch_without_rows_does_not_change_the_critic() -> None:
    learner = learner_of(small_model(), needs_critic=True, algorithm="gae")
    scores = learner.score([])
    metrics = learner.learn([], Advantages([], []), scores)
    assert metrics["critic/explained_variance"] == 0.0
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.slow
async def test_ppo_learns_a_trivial_task_and_its_critic_predicts_the_reward(tmp_path: Path) -> None:
    @reward
    def early_letters(response: str) -> float:
        """Share of the text that is made of the first letters of the alphabet."""
        return sum(letter in "abcdefgh " for letter in response) / max(1, len(response))

    config = TrainConfig(
        algorithm="gae",
        steps=15,
        tasks_per_step=4,
        attempts=8,
        temperature=2.0,  # at 1 the model says nearly the same every time
        learning_rate=2e-3,
        dtype="float32",
        critic={"learning_rate": 2e-3, "updates_per_step": 2, "warmup_steps": 2},  # type: ignore[arg-type]
    )
    agent = Agent(model="tiny", max_turns=1, max_tokens_per_turn=6)
    tasks = [f"Say something about {number}." for number in range(10)]
    result = await Trainer(agent, tasks, early_letters, run_dir=tmp_path, config=config).run()
    rewards = [metrics["reward/mean"] for metrics in result.metrics.values()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    first, last = result.metrics[1], result.metrics[15]
    assert first["critic/value_mean"] < 0.5 * first["critic/return_mean"]
    assert last["critic/value_mean"] == pytest.approx(last["critic/return_mean"], abs=0.2)
