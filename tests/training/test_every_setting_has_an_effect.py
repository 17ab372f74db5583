"""Every setting of a training run has an effect. A new setting needs a line here that names the test of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from agentfly.agents.agent import Agent
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs, Advantages
from agentfly.training.config.groups import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    DynamicSamplingConfig,
    EarlyStopConfig,
    KLConfig,
    LoRAConfig,
    OverlongConfig,
)
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.optimizer import learning_rate_factor
from agentfly.training.rows import Row, RowBatch, RowTurn, apply_row_limits
from agentfly.training.validation import training_temperature
from tests.training.small_learning import constant, learner_of, rows_of, small_model, weights

GROUPS: dict[str, type[BaseModel]] = {
    "advantage": AdvantageConfig,
    "correction": CorrectionConfig,
    "critic": CriticConfig,
    "dynamic_sampling": DynamicSamplingConfig,
    "early_stop": EarlyStopConfig,
    "kl": KLConfig,
    "lora": LoRAConfig,
    "overlong": OverlongConfig,
}

KL = {"kl": {"coefficient": 0.1}}
CORRECTED = {"correction": {"upper": 1.5}}
LORA = {"lora": {"rank": 4, "alpha": 8}}

LEARNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss": ({}, {"loss": "cispo"}),
    "aggregation": ({}, {"aggregation": "sequence_mean"}),
    "aggregation_tokens": (
        {"aggregation": "constant", "aggregation_tokens": 5},
        {"aggregation": "constant", "aggregation_tokens": 50},
    ),
    "learning_rate": ({}, {"learning_rate": 2e-3}),
    "weight_decay": ({}, {"weight_decay": 0.1}),
    "adam_betas": ({}, {"adam_betas": (0.5, 0.999)}),
    "adam_epsilon": ({}, {"adam_epsilon": 1e-2}),
    "max_grad_norm": ({}, {"max_grad_norm": 1e-3}),
    "updates_per_step": ({}, {"updates_per_step": 2}),
    "mini_batches": ({}, {"mini_batches": 2}),
    "clip_low": ({}, {"clip_low": 0.9}),
    "clip_high": ({}, {"clip_high": 3.0}),
    "clip_dual": ({}, {"clip_dual": 1.5}),
    "entropy_coefficient": ({}, {"entropy_coefficient": 0.1}),
    "seed": (LORA, {**LORA, "seed": 1}),
    "correction": ({}, CORRECTED),
    "correction.level": (CORRECTED, {"correction": {"upper": 1.5, "level": "sequence"}}),
    "correction.mode": (CORRECTED, {"correction": {"upper": 1.5, "mode": "mask"}}),
    "correction.upper": (CORRECTED, {"correction": {"upper": 1.1}}),
    "correction.lower": (CORRECTED, {"correction": {"upper": 1.5, "lower": 0.9}}),
    "kl": ({}, KL),
    "kl.coefficient": (KL, {"kl": {"coefficient": 0.2}}),
    "kl.where": (KL, {"kl": {"coefficient": 0.1, "where": "reward"}}),
    "kl.estimator": (KL, {"kl": {"coefficient": 0.1, "estimator": "full"}}),
    "kl.gradient": (KL, {"kl": {"coefficient": 0.1, "gradient": "k2"}}),
    "kl.target_nats": (KL, {"kl": {"coefficient": 0.1, "target_nats": 1e-6, "horizon_rows": 4}}),
    "kl.horizon_rows": (
        {"kl": {"coefficient": 0.1, "target_nats": 1e-6, "horizon_rows": 4}},
        {"kl": {"coefficient": 0.1, "target_nats": 1e-6, "horizon_rows": 40}},
    ),
    "lora": ({}, LORA),
    "lora.rank": (LORA, {"lora": {"rank": 2, "alpha": 4}}),
    "lora.alpha": (LORA, {"lora": {"rank": 4, "alpha": 16}}),
    "lora.dropout": (LORA, {"lora": {"rank": 4, "alpha": 8, "dropout": 0.5}}),
    "lora.target_modules": (LORA, {"lora": {"rank": 4, "alpha": 8, "target_modules": ("q_proj",)}}),
    "critic": ({"algorithm": "gae"}, {"algorithm": "gae", "critic": {"learning_rate": 1e-3}}),
    "critic.learning_rate": ({"algorithm": "gae"}, {"algorithm": "gae", "critic": {"learning_rate": 1e-3}}),
    "critic.updates_per_step": ({"algorithm": "gae"}, {"algorithm": "gae", "critic": {"updates_per_step": 2}}),
    "critic.clip_value": (
        {"algorithm": "gae", "critic": {"updates_per_step": 3, "learning_rate": 0.1, "clip_value": 1e-3}},
        {"algorithm": "gae", "critic": {"updates_per_step": 3, "learning_rate": 0.1, "clip_value": None}},
    ),
    "critic.warmup_steps": ({"algorithm": "gae"}, {"algorithm": "gae", "critic": {"warmup_steps": 1}}),
}
"""Settings, and others, with which a model learns to have other weights."""

JUDGED: dict[str, tuple[str, AdvantageConfig]] = {
    "advantage.discount": ("reinforce_plus_plus", AdvantageConfig(discount=0.5)),
    "advantage.gae_lambda": ("gae", AdvantageConfig(gae_lambda=0.5)),
    "advantage.step_discount": ("gigpo", AdvantageConfig(step_discount=0.5)),
    "advantage.step_weight": ("gigpo", AdvantageConfig(step_weight=2.0)),
    "advantage.divide_by_std": ("gigpo", AdvantageConfig(divide_by_std=False)),
    "advantage.anchor_match": ("gigpo", AdvantageConfig(anchor_match="similar", anchor_similarity=0.5)),
}
"""Settings with which an algorithm judges the same batch otherwise."""

RATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({"schedule": "linear"}, {"schedule": "linear", "steps": 8}),
    "schedule": ({}, {"schedule": "cosine"}),
    "min_learning_rate_ratio": ({"schedule": "linear"}, {"schedule": "linear", "min_learning_rate_ratio": 0.5}),
    "warmup_steps": ({}, {"warmup_steps": 10}),
}
"""Settings, and others, with which the learning rate of the seventh step is another."""

LIMITED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_row_tokens": ({}, {"max_row_tokens": 4}),
    "overlong": ({}, {"overlong": {"max_tokens": 4, "buffer_tokens": 2}}),
    "overlong.max_tokens": (
        {"overlong": {"max_tokens": 4, "buffer_tokens": 2}},
        {"overlong": {"max_tokens": 5, "buffer_tokens": 2}},
    ),
    "overlong.buffer_tokens": (
        {"overlong": {"max_tokens": 4, "buffer_tokens": 2}},
        {"overlong": {"max_tokens": 4, "buffer_tokens": 4}},
    ),
    "overlong.penalty": (
        {"overlong": {"max_tokens": 4, "buffer_tokens": 2}},
        {"overlong": {"max_tokens": 4, "buffer_tokens": 2, "penalty": 0.5}},
    ),
}
"""Settings, and others, that leave other rows, or rows of other rewards."""

LOADED = {
    "dtype": "bfloat16",
    "device": "cuda",
    "threads": 3,
    "max_concurrent_generations": 2,
    "max_context_tokens": 99,
}
"""Settings that the policy is loaded with."""

SHOWN: dict[str, str] = {
    "algorithm": "test_advantages.py::test_advantages_of_one_group_match_a_manual_calculation",
    "advantage": "test_gigpo.py::test_step_weight_scales_only_the_step_advantage",
    "advantage.anchor_similarity": "test_gigpo.py::test_similar_states_are_one_where_that_is_asked_for",
    "dynamic_sampling": "test_overlap.py::test_tasks_that_teach_nothing_are_replaced_and_counted",
    "dynamic_sampling.max_refills": "test_overlap.py::test_groups_missing_after_the_last_refill_are_not_replaced",
    "tasks_per_step": "test_overlap.py::test_a_step_takes_the_oldest_groups_and_lets_those_of_the_next_steps_begin",
    "max_staleness": "test_overlap.py::test_rollouts_run_ahead_of_the_weights_by_no_more_than_the_bound",
    "eval_every_steps": "test_resume.py::test_a_run_can_be_made_longer_and_looked_at_more_often",
    "eval_attempts": ("test_early_stop.py::test_a_stored_evaluation_is_repeated_only_if_its_settings_changed"),
    "eval_temperature": ("test_early_stop.py::test_a_stored_evaluation_is_repeated_only_if_its_settings_changed"),
    "eval_metric": ("test_early_stop.py::test_a_run_resumed_with_another_metric_starts_a_new_evaluation_history"),
    "early_stop": "test_early_stop.py::test_a_target_that_is_met_before_the_first_step_leaves_the_model_as_it_is",
    "early_stop.target": (
        "test_early_stop.py::test_a_target_that_is_met_before_the_first_step_leaves_the_model_as_it_is"
    ),
    "early_stop.patience": (
        "test_early_stop.py::test_patience_ends_a_run_with_a_checkpoint_and_more_patience_resumes_it"
    ),
    "keep_checkpoints": "test_resume.py::test_a_run_can_be_made_longer_and_looked_at_more_often",
    "keep_best": "test_early_stop.py::test_the_best_step_has_a_checkpoint_that_is_kept_and_found_by_its_link",
    "trackers": "test_trackers.py::test_a_registered_tracker_follows_a_training_run",
    "project": "test_trackers.py::test_a_registered_tracker_follows_a_training_run",
    "attempts": "test_trainer.py::test_a_run_leaves_metrics_trajectories_and_a_checkpoint_that_any_program_loads",
    "checkpoint_every_steps": "test_trainer.py::test_a_run_that_is_stopped_again_and_again_ends_as_one_that_never_was",
    "micro_batch_tokens": "test_same_update.py::test_an_update_is_the_same",
    "gradient_checkpointing": "test_same_update.py::test_an_update_is_the_same",
    "max_concurrent_rollouts": "test_overlap.py::test_rollouts_run_ahead_of_the_weights_by_no_more_than_the_bound",
}
"""Settings of the run as a whole, and the test of this folder that shows what they do."""

READ = {"strategy", "max_failure_rate", "max_concurrent_starts"}
"""Settings that are handed to the runner as they are, whose own tests show what they do; `test_trainer` has it that a
run reads every setting."""


def batch() -> list[Row]:
    """Return rows with ratios of e and of 1/e, so that every bound affects some of them."""
    shifts = [-1.0, 1.0, 1.0, -1.0]
    return [
        replace(row, logprobs=[logprob + shift for logprob in row.logprobs])
        for row, shift in zip(rows_of(small_model()), shifts, strict=True)
    ]


def learned(settings: Mapping[str, Any]) -> torch.Tensor:
    """All weights, with the critic's output layer, after two steps."""
    return _learned(json.dumps(settings))


@cache
def _learned(words: str) -> torch.Tensor:
    settings = json.loads(words)
    model = small_model()
    critic = settings.get("algorithm") == "gae"
    learner = learner_of(model, needs_critic=critic, **settings)
    rows = batch()
    for _ in range(2):
        scores = learner.score(rows)
        values = constant(rows, [1.0, -1.0, 0.5, -0.5])
        if scores.token_rewards is not None:
            values = [value + earned for value, earned in zip(values, scores.token_rewards, strict=True)]
        learner.learn(rows, Advantages(values, constant(rows, [1.0, 0.0, 1.0, 0.0]) if critic else None), scores)
    of_critic = learner.state()["critic"]
    head = [weight.flatten() for weight in of_critic["head"].values()] if of_critic else []
    return torch.cat([weights(model), *head])


@pytest.mark.parametrize("setting", LEARNED)
def test_other_weights_are_learned(setting: str) -> None:
    base, changed = LEARNED[setting]
    before, after = learned(base), learned(changed)
    assert before.shape != after.shape or not torch.equal(before, after)


@pytest.mark.parametrize("setting", JUDGED)
def test_the_setting_changes_the_advantages_of_the_same_batch(setting: str) -> None:
    algorithm, changed = JUDGED[setting]
    first, other = RowTurn(0, 1, 2, anchor="a", state="a room"), RowTurn(1, 3, 5, anchor="b", state="a roof")
    seconds = [other, other, replace(other, anchor="a", state="a room")]
    rows = [
        Row([1] * 5, (0, 1, 0, 1, 1), [-1.0] * 5, [0] * 5, "g", f"r{number}", number**2, False, turns=(first, second))
        for number, second in enumerate(seconds)
    ]
    evidence = AdvantageInputs(rows, values=[np.array([0.1, 0.2, 0.4]) for _ in rows])
    ways = [ALGORITHMS[algorithm].estimate(evidence, config).values for config in (AdvantageConfig(), changed)]
    assert not np.allclose(*ways)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", RATED)
def test_the_setting_changes_the_learning_rate(setting: str) -> None:
    rates = []
    for settings in RATED[setting]:
        config = TrainConfig(**settings)
        rates.append(
            learning_rate_factor(
                6,
                steps=config.steps,
                warmup=config.warmup_steps,
                schedule=config.schedule,
                final_share=config.min_learning_rate_ratio,
            )
        )
    assert rates[0] != rates[1]


@pytest.mark.parametrize("setting", LIMITED)
def test_other_rows_are_left_or_other_rewards(setting: str) -> None:
    ways = []
    for settings in LIMITED[setting]:
        config = TrainConfig(**settings)
        rows = apply_row_limits(
            RowBatch(tuple(batch()), {}), overlong=config.overlong, max_row_tokens=config.max_row_tokens
        ).rows
        ways.append([(len(row), row.reward) for row in rows])
    assert ways[0] != ways[1]


@pytest.mark.parametrize("setting", LOADED)
def test_the_policy_is_loaded_with_it(setting: str) -> None:
    assert TrainConfig(**{setting: LOADED[setting]}).policy_settings[setting] == LOADED[setting]  # type: ignore[arg-type]


def test_rollouts_are_sampled_at_its_temperature() -> None:
    agent = Agent(model="tiny", temperature=1.0)
    assert [training_temperature(agent, TrainConfig(temperature=each)) for each in (None, 0.5)] == [1.0, 0.5]


@pytest.mark.parametrize("setting", SHOWN)
def test_there_is_a_test_of_its_effect(setting: str) -> None:
    file, name = SHOWN[setting].split("::")
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {name}\b", text, re.MULTILINE)
    assert setting.rpartition(".")[2] in text


def test_every_setting_has_a_line_here() -> None:
    settings = {*TrainConfig.model_fields}
    settings |= {f"{group}.{name}" for group, config in GROUPS.items() for name in config.model_fields}
    found = {
        kind
        for field in TrainConfig.model_fields.values()
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }
    assert found == set(GROUPS.values())
    seen = {*LEARNED, *JUDGED, *RATED, *LIMITED, *LOADED, *SHOWN, *READ, "temperature"}
    assert settings - seen == set()
    assert seen - settings == set()
