"""TrainConfig refuses contradictory settings, with the cure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from yaml import safe_load_all

from agentfly.core.errors import ConfigError
from agentfly.training.config.train_config import TrainConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_concurent_rollouts": 8}, "Did you mean 'max_concurrent_rollouts'"),
        ({"steps": 0}, "steps=0: input should be greater than 0"),
        ({"steps": "many"}, "steps='many': input should be a valid integer"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"dtype": "float8"}, "'auto', 'float32' or 'bfloat16'"),
        ({"algorithm": "grop"}, "Did you mean 'grpo'"),
        ({"loss": "ppo_clp"}, "Did you mean 'ppo_clip'"),
        ({"attempts": 1}, "nothing from a group of fewer than 2"),
        ({"clip_low": 1.5}, "set clip_low=1 for no lower bound"),
        ({"aggregation": "constant"}, "aggregation=constant with aggregation_tokens=None"),
        ({"aggregation_tokens": 512}, "only aggregation=constant divides"),
        ({"steps": 5, "warmup_steps": 6}, "warmup_steps=6 is more than steps=5"),
        ({"eval_attempts": 4}, "all attempts at a task are the same"),
        ({"temperature": 0.0}, "temperature=0.0: input should be greater than 0"),
        ({"kl": {"target_nats": 0.1}}, "Set kl.coefficient to its initial value"),
        ({"kl": {"coefficient": 0.1, "where": "reward", "gradient": "k2"}}, "a reward has no gradient"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "the gradient of k1 is 0 on average"),
        ({"correction": {"mode": "mask", "upper": 0.5}}, "below the smallest weight, 2.0"),
        ({"learning_rate": True}, "learning_rate=True: input should not be a truth value"),
        ({"critic": {"warmup_steps": True}}, "critic.warmup_steps=True: input should not be a truth value"),
        ({"seed": 2**32}, "seed=4294967296: input should be less than 4294967296"),
        ({"overlong": {"max_tokens": 5}}, "overlong.buffer_tokens is required and missing"),
        ({"algorithm": "gae", "critic": {"warmup_steps": 100}}, "the policy never. Lower critic.warmup_steps"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        TrainConfig(**settings)
    assert message in str(refusal.value)


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        TrainConfig(steps=0, attemps=4)  # type: ignore[call-arg]
    assert "steps=0" in str(refusal.value)
    assert "Did you mean 'attempts'" in str(refusal.value)


def test_the_resolved_settings_make_the_same_configuration_again() -> None:
    config = TrainConfig(steps=7, eval_every_steps=3, learning_rate=3e-4)
    assert TrainConfig(**config.model_dump()) == config


def test_an_algorithm_without_a_baseline_takes_groups_of_one() -> None:
    assert TrainConfig(algorithm="reinforce", attempts=1).attempts == 1


def test_the_recipes_of_the_guide_can_be_followed() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "losses.md").read_text(encoding="utf-8")
    recipes = [
        one for block in re.findall(r"^```yaml\n(.*?)^```", guide, re.DOTALL | re.M) for one in safe_load_all(block)
    ]
    assert len(recipes) >= 5
    for recipe in recipes:
        TrainConfig(**recipe["training"])


def test_every_setting_has_a_description() -> None:
    assert [name for name, field in TrainConfig.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("given", "trackers"),
    [("wandb", ("wandb",)), ("tensorboard, wandb", ("tensorboard", "wandb")), ("none", ()), ("", ())],
)
def test_trackers_may_be_given_as_one_text(given: str, trackers: tuple[str, ...]) -> None:
    assert TrainConfig(trackers=given).trackers == trackers  # type: ignore[arg-type]
    assert TrainConfig(report_to=given).trackers == trackers  # type: ignore[call-arg]
