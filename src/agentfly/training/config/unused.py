"""Settings that nothing would read: refused, so that no run differs from what its configuration seems to say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agentfly.errors import ConfigError
from agentfly.training.advantages import ALGORITHMS
from agentfly.training.config.settings import Settings
from agentfly.training.losses import LOSSES

if TYPE_CHECKING:
    from agentfly.training.config.train_config import TrainConfig

OF_LOSSES = ("clip_low", "clip_high", "clip_dual")
"""The settings that a loss is handed; those below ``advantage`` are what an algorithm is handed."""


def refuse_unused(config: TrainConfig) -> None:
    """Raise if a setting has another value than its default and the other settings leave it without any use.

    Raises:
        ConfigError: there is such a setting. The message says what would use it, or do what it was meant to do.
    """
    unused = {**_of_the_algorithm(config), **_of_the_loss(config), **_of_other_settings(config)}
    complaints = [f"{name}={_plain(value)}: {unused[name]}" for name, value in changed(config) if name in unused]
    if complaints:
        raise ConfigError("\n".join(complaints))


def changed(settings: Settings, within: str = "") -> Iterator[tuple[str, Any]]:
    """The settings that have another value than their default. Those of groups that are always there follow theirs."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            yield within + name, value
            if isinstance(value, Settings) and isinstance(field.default, Settings):
                yield from changed(value, f"{name}.")


def _of_the_algorithm(config: TrainConfig) -> dict[str, str]:
    """What the algorithm does not read, and what to do instead."""
    name, algorithm = config.algorithm, config.chosen_algorithm
    unused = {}
    for setting in type(config.advantage).model_fields:
        if setting not in algorithm.uses:
            cure = algorithm.instead.get(setting) or _choose(
                other for other in ALGORITHMS if setting in ALGORITHMS[other].uses
            )
            unused[f"advantage.{setting}"] = f"algorithm={name} does not use it. {cure}"
    if not algorithm.needs_critic:
        users = ", ".join(other for other in ALGORITHMS if ALGORITHMS[other].needs_critic)
        for setting in type(config.critic).model_fields:
            unused[f"critic.{setting}"] = (
                f"algorithm={name} has no critic. Choose one that has ({users}), or leave it out."
            )
    return unused


def _of_the_loss(config: TrainConfig) -> dict[str, str]:
    """What the loss does not read, and what to do instead."""
    return {
        setting: f"loss={config.loss} does not use it. "
        + _choose(other for other in LOSSES if setting in LOSSES[other].uses)
        for setting in OF_LOSSES
        if setting not in config.chosen_loss.uses
    }


def _of_other_settings(config: TrainConfig) -> dict[str, str]:
    """What another setting leaves without use, and what to do instead."""
    unused = {}
    if config.advantage.anchor_match == "exact":
        unused["advantage.anchor_similarity"] = (
            "advantage.anchor_match=exact compares no texts. Set advantage.anchor_match=similar, or leave it out."
        )
    if config.advantage.step_weight == 0:
        for setting in ("step_discount", "anchor_match"):
            unused[f"advantage.{setting}"] = (
                "advantage.step_weight=0 leaves out what it is for. Raise step_weight, or leave this out."
            )
    if config.kl.coefficient == 0:
        for setting in ("where", "estimator", "gradient"):
            unused[f"kl.{setting}"] = (
                "kl.coefficient=0 measures no divergence. Set kl.coefficient, such as 0.01, or leave this out."
            )
    if config.kl.target_nats is None:
        unused["kl.horizon_rows"] = "it is for the coefficient that kl.target_nats adapts. Set that, or leave this out."
    if config.schedule == "constant":
        unused["final_learning_rate_share"] = (
            "with schedule=constant the learning rate does not fall. Set schedule=linear or cosine, or leave this out."
        )
    if config.early_stop is None and not config.keep_best:
        unused["eval_metric"] = "only keep_best and early_stop look at it. Set one of them, or leave this out."
    return unused


def _choose(users: Iterator[str]) -> str:
    return f"Choose one that does ({', '.join(users)}), or leave it out."


def _plain(value: Any) -> str:
    """A value as it is written in a file."""
    return str(value).lower() if isinstance(value, bool) else str(value)
