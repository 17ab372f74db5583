"""A setting without effect is refused, and the error names the setting that has the wanted effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.core.errors import ConfigError
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs
from agentfly.training.config.base import BaseConfig
from agentfly.training.config.groups import AdvantageConfig, CriticConfig
from agentfly.training.config.train_config import LOSS_SETTINGS, TrainConfig, changed_settings
from agentfly.training.losses import LOSSES
from agentfly.training.losses.aggregation import ClipRange, TokenBatch
from agentfly.training.rows import Row, RowTurn

ADVANTAGE: dict[str, dict[str, Any]] = {
    "discount": {"discount": 0.5},
    "gae_lambda": {"gae_lambda": 0.5},
    "step_discount": {"step_discount": 0.5},
    "step_weight": {"step_weight": 2.0},
    "divide_by_std": {"divide_by_std": False},
    "anchor_match": {"anchor_match": "similar"},
    "anchor_similarity": {"anchor_match": "similar", "anchor_similarity": 0.2},
}
"""For each setting, the setting with another value than its default, and what it needs to have a use."""

PLACE = "the house at the end of the long road, which has a"

CLIPS = {"clip_low": 0.1, "clip_high": 0.1, "clip_dual": 1.5}

CRITIC = {"learning_rate": 1e-3, "updates_per_step": 2, "clip_value": None, "warmup_steps": 1}


def evidence() -> AdvantageInputs:
    """Three attempts of two turns, some in like states, with all that an algorithm may look at."""
    rows = []
    for number, (state, reward) in enumerate([(f"{PLACE} room", 1.0), (f"{PLACE} roof", 0.0), ("a door", 0.4)]):
        hall = RowTurn(0, 1, 3, reward=0.1 * number, anchor="the hall", state="the hall")
        turns = (hall, RowTurn(1, 4, 6, reward=reward, anchor=state, state=state))
        mask = [0, 1, 1, 0, 1, *[1] * (1 + number)]
        length = len(mask)
        rows.append(
            Row([7] * length, mask, [-0.5] * length, [0] * length, "g", str(number), reward, False, turns=turns)
        )
    values = [np.linspace(0.0, 0.3 + row.reward, len(row.targets)) for row in rows]
    return AdvantageInputs(rows, values=values, baselines={"g": 0.2})


def judged(algorithm: str, **settings: Any) -> np.ndarray:
    return np.concatenate(ALGORITHMS[algorithm].estimate(evidence(), AdvantageConfig(**settings)).values)


@pytest.mark.parametrize("setting", ADVANTAGE)
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_an_algorithm_reads_exactly_the_settings_that_it_declares_and_others_are_refused(
    algorithm: str, setting: str
) -> None:
    given = ADVANTAGE[setting]
    base = {name: value for name, value in given.items() if name != setting}
    declared = setting in ALGORITHMS[algorithm].uses
    assert declared == (not np.allclose(judged(algorithm, **base), judged(algorithm, **given)))
    if declared:
        assert TrainConfig(algorithm=algorithm, advantage=given).advantage == AdvantageConfig(**given)  # type: ignore[arg-type]
    else:
        with pytest.raises(
            ConfigError, match=rf"advantage\.{setting}=\S+: algorithm={algorithm} does not use it\. \w+"
        ):
            TrainConfig(algorithm=algorithm, advantage=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", CRITIC)
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_settings_of_a_critic_are_refused_without_one(algorithm: str, setting: str) -> None:
    given: dict[str, Any] = {setting: CRITIC[setting]}
    if ALGORITHMS[algorithm].needs_critic:
        assert TrainConfig(algorithm=algorithm, critic=given).critic == CriticConfig(**given)  # type: ignore[arg-type]
    else:
        with pytest.raises(ConfigError, match=rf"critic\.{setting}=\S+: algorithm={algorithm} has no critic.*\(gae\)"):
            TrainConfig(algorithm=algorithm, critic=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", LOSS_SETTINGS)
@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_loss_reads_exactly_the_settings_that_it_declares_and_others_are_refused(loss: str, setting: str) -> None:
    ratios = torch.tensor([0.4, 3.0, 0.85, 1.2, 3.0])
    batch = TokenBatch(
        logprobs=ratios.log(),
        old=torch.zeros(5),
        advantages=torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0]),
        mask=torch.ones(5, dtype=torch.bool),
        row=torch.arange(5),
        weights=torch.ones(5),
    )
    clip = ClipRange(0.2, 0.28)
    other = dataclasses.replace(clip, **{setting.removeprefix("clip_"): CLIPS[setting]})
    declared = setting in LOSSES[loss].uses
    assert declared == (not torch.equal(LOSSES[loss](batch, clip).loss, LOSSES[loss](batch, other).loss))
    if declared:
        assert getattr(TrainConfig(loss=loss, **{setting: CLIPS[setting]}), setting) == CLIPS[setting]  # type: ignore[arg-type]
    else:
        with pytest.raises(ConfigError, match=rf"{setting}=\S+: loss={loss} does not use it.*ppo_clip"):
            TrainConfig(loss=loss, **{setting: CLIPS[setting]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("unused", "used"),
    [
        ({"kl": {"estimator": "k2"}}, {"kl": {"estimator": "k2", "coefficient": 0.1}}),
        ({"kl": {"where": "reward"}}, {"kl": {"where": "reward", "coefficient": 0.1}}),
        ({"kl": {"gradient": "k2"}}, {"kl": {"gradient": "k2", "coefficient": 0.1}}),
        (
            {"kl": {"coefficient": 0.1, "horizon_rows": 9}},
            {"kl": {"coefficient": 0.1, "horizon_rows": 9, "target_nats": 0.1}},
        ),
        ({"min_learning_rate_ratio": 0.1}, {"min_learning_rate_ratio": 0.1, "schedule": "linear"}),
        ({"eval_metric": "success/mean"}, {"eval_metric": "success/mean", "keep_best": True}),
        (
            {"algorithm": "gigpo", "advantage": {"anchor_similarity": 0.5}},
            {"algorithm": "gigpo", "advantage": {"anchor_similarity": 0.5, "anchor_match": "similar"}},
        ),
        (
            {"algorithm": "gigpo", "advantage": {"step_weight": 0.0, "step_discount": 0.5}},
            {"algorithm": "gigpo", "advantage": {"step_discount": 0.5}},
        ),
    ],
)
def test_a_setting_made_unused_by_another_is_refused(unused: Mapping[str, Any], used: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"leave (this|it) out"):
        TrainConfig(**unused)
    TrainConfig(**used)


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"advantage": {"divide_by_std": False}}, "Choose algorithm=dr_grpo, which is grpo without dividing"),
        ({"advantage": {"discount": 0.9}}, r"Choose one that does \(reinforce_plus_plus, gae\), or leave it out"),
        ({"algorithm": "gigpo", "advantage": {"discount": 0.9}}, "Set step_discount"),
        ({"loss": "cispo", "clip_dual": 3.0}, r"Choose one that does \(ppo_clip, gspo\)"),
    ],
)
def test_the_message_names_the_setting_to_use_instead(settings: Mapping[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        TrainConfig(**settings)


def test_all_unused_settings_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as output:
        TrainConfig(loss="policy_gradient", clip_low=0.1, clip_high=0.3, critic={"warmup_steps": 1})  # type: ignore[arg-type]
    assert [line.split("=")[0] for line in str(output.value).splitlines()] == [
        "clip_low",
        "clip_high",
        "critic.warmup_steps",
    ]


def test_a_configuration_that_was_written_out_with_every_setting_is_read_again() -> None:
    for algorithm in ALGORITHMS:
        config = TrainConfig(algorithm=algorithm)
        assert TrainConfig(**config.model_dump(mode="json")) == config
        assert [name for name, _ in changed_settings(config)] == ([] if algorithm == "grpo" else ["algorithm"])


def test_every_setting_of_algorithms_losses_and_critics_is_walked_here() -> None:
    groups: list[tuple[type[BaseConfig], Mapping[str, Any]]] = [(AdvantageConfig, ADVANTAGE), (CriticConfig, CRITIC)]
    for group, walked in groups:
        assert set(group.model_fields) == set(walked)
    assert set(LOSS_SETTINGS) == set(CLIPS)
    for name in ALGORITHMS:
        assert {*ALGORITHMS[name].uses, *ALGORITHMS[name].unused_setting_hints} <= set(ADVANTAGE)
