"""BaseConfig: the base of all groups of training settings, with the synonyms of other frameworks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from agentfly.core.errors import ConfigError, nearest_name
from agentfly.core.json_values import brief

SYNONYMS: Mapping[str, str] = {
    "adv_estimator": "algorithm",
    "advantage_estimator": "algorithm",
    "beta": "kl.coefficient",
    "clip_ratio_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "entropy_coeff": "entropy_coefficient",
    "ent_coef": "entropy_coefficient",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "eval_steps": "eval_every_steps",
    "gae_lam": "advantage.gae_lambda",
    "gamma": "advantage.discount",
    "group_size": "attempts",
    "kl_coef": "kl.coefficient",
    "kl_loss_coef": "kl.coefficient",
    "lam": "advantage.gae_lambda",
    "learning_rate_schedule": "schedule",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "loss_agg_mode": "aggregation",
    "loss_type": "loss",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "max_steps": "steps",
    "n_samples_per_prompt": "attempts",
    "num_generations": "attempts",
    "num_iterations": "updates_per_step",
    "num_steps": "steps",
    "ppo_epochs": "updates_per_step",
    "report_to": "trackers",
    "save_steps": "checkpoint_every_steps",
    "save_total_limit": "keep_checkpoints",
    "test_freq": "eval_every_steps",
    "total_steps": "steps",
    "total_training_steps": "steps",
}
"""Training settings by what they are called elsewhere; both mean the same number in the same unit."""

SETTING_HINTS: Mapping[str, str] = {
    name: text
    for names, text in (
        (
            ("batch_size", "train_batch_size", "per_device_train_batch_size", "rollout_batch_size"),
            "A step trains tasks_per_step tasks with attempts rollouts of each: set these two. How much is computed at "
            "once is micro_batch_tokens.",
        ),
        (
            ("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size_per_gpu"),
            "The batch is divided into micro-batches that fit into memory: set micro_batch_tokens. It changes no "
            "number.",
        ),
        (
            ("ppo_mini_batch_size", "mini_batch_size"),
            "Set mini_batches, the number of parts of a batch that make an update each.",
        ),
        (
            ("num_train_epochs", "num_epochs", "epochs", "total_epochs"),
            "A run is measured in steps: set steps to epochs times tasks divided by tasks_per_step. "
            "For several updates on the same rollouts set updates_per_step.",
        ),
        (
            ("max_completion_length", "max_response_length", "max_new_tokens", "max_tokens"),
            "How much is sampled is a limit of the agent: Agent(max_tokens_per_turn=…, max_sampled_tokens=…).",
        ),
        (
            ("max_prompt_length", "max_seq_length", "max_length"),
            "The length of a sequence is limited by the agent: Agent(max_sequence_tokens=…). The limit of memory is "
            "max_context_tokens.",
        ),
        (("top_p", "top_k", "min_p"), "How tokens are sampled is up to the agent: Agent(top_p=…, top_k=…)."),
        (("max_turns",), "How many turns there may be is a limit of the agent: Agent(max_turns=…)."),
        (
            ("scale_rewards", "norm_adv_by_std_in_grpo"),
            "Whether advantages are divided by the standard deviation is up to the algorithm: grpo does, dr_grpo does "
            "not.",
        ),
    )
    for name in names
}
"""Advice for training settings of other frameworks that have no counterpart with the same meaning."""

SFT_SYNONYMS: Mapping[str, str] = {
    **{
        name: meant
        for name, meant in SYNONYMS.items()
        if meant in ("learning_rate", "schedule", "lora.rank", "lora.alpha", "keep_checkpoints")
    },
    "batch_size": "rows_per_update",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "save_steps": "checkpoint_every_updates",
    "total_epochs": "epochs",
    "train_batch_size": "rows_per_update",
}
"""Settings of a warm start by what they are called elsewhere; both mean the same number in the same unit."""

SFT_SETTING_HINTS: Mapping[str, str] = {
    **{
        name: SETTING_HINTS[name]
        for name in ("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size_per_gpu")
    },
    **dict.fromkeys(
        ("max_steps", "num_steps", "steps", "total_steps", "total_training_steps"),
        "A warm start is measured in epochs: set epochs. An update uses rows_per_update rows.",
    ),
    **dict.fromkeys(
        ("max_length", "max_seq_length"),
        "Conversations are left out and never cut: set max_context_tokens, the most tokens that one may have.",
    ),
    "per_device_train_batch_size": "Set rows_per_update, the rows of an update, and micro_batch_tokens for memory.",
}
"""Advice for warm-start settings of other frameworks that have no counterpart with the same meaning."""


def resolve_synonyms(
    values: Mapping[str, Any], known: Mapping[str, Any], synonyms: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings under their canonical names.

    Args:
        values: settings as a user wrote them; groups are mappings.
        known: the canonical names.
        synonyms: canonical names by synonym.

    Returns:
        The settings, and the canonical names by the renamed ones. A name is not changed if the setting is also given
        under its canonical name.
    """
    renamed: dict[str, Any] = dict(values)
    names: dict[str, str] = {}
    for name in values:
        if name in known or name not in synonyms:
            continue
        group, _, last = synonyms[name].rpartition(".")
        target = renamed
        if group:
            inner = renamed.get(group)
            if not isinstance(inner, Mapping | None):
                continue
            target = dict(inner or {})
        if last in target:
            continue
        target[last] = renamed.pop(name)
        if group:
            renamed[group] = target
        names[name] = synonyms[name]
    return renamed, names


def names_of_changed(change: Mapping[str, Any], synonyms: Mapping[str, str]) -> set[str]:
    """Return the synonyms of the settings that a change sets, directly or with their whole group.

    Args:
        change: settings under their canonical names; groups are mappings.
        synonyms: canonical names by synonym.
    """
    changed = list(_dotted(change))
    return {
        name for name, meant in synonyms.items() if any(meant == one or meant.startswith(f"{one}.") for one in changed)
    }


def _dotted(values: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{within}{name}.")
        else:
            yield f"{within}{name}"


_log = logging.getLogger("agentfly")


class BaseConfig(BaseModel):
    """A frozen group of settings with strict names and its own error messages.

    Raises:
        ConfigError: a setting is unknown (the message has the nearest name), out of its range, or contradicts another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    GROUP: ClassVar[str] = ""
    """Name of the group among the training settings, such as ``kl``; empty for the training settings themselves."""
    SYNONYMS: ClassVar[Mapping[str, str]] = {}
    """Canonical names by the names in other frameworks, which are accepted too."""
    SETTING_HINTS: ClassVar[Mapping[str, str]] = {}
    """Advice for settings of other frameworks that have no counterpart with the same meaning."""

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse ``yes`` and ``true``, which YAML reads as a truth value and Python as the number 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation is not bool and not _is_group(annotation):
            raise PydanticCustomError("no_truth_value", "Input should not be a truth value")
        return value

    @model_validator(mode="before")
    @classmethod
    def _apply_synonyms(cls, values: Any) -> Any:
        """Convert settings with the names of other frameworks to their names here."""
        return cls.canonical(values) if isinstance(values, Mapping) else values

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, value: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            raise ConfigError("\n".join(map(cls._error_message, error.errors()))) from None

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings under their names here. A warning lists those that were given under another name."""
        settings, renamed = resolve_synonyms(values, cls.model_fields, cls.SYNONYMS)
        within = f"{cls.GROUP}." if cls.GROUP else ""
        for given, name in renamed.items():
            _log.warning("The setting %s%s is called %s%s here, and is read as that.", within, given, within, name)
        return settings

    @classmethod
    def refuse_misspelled(cls, function: Callable[..., Any], given: Iterable[str]) -> None:
        """Refuse an unknown setting that is probably a misspelled argument of the function that takes the settings.

        Raises:
            ConfigError: an argument has a similar name; the message contains it.
        """
        settings = [*cls.model_fields, *cls.SYNONYMS, *cls.SETTING_HINTS]
        arguments = [name for name in signature(function).parameters if name != "settings"]
        for name in given:
            near = None if name in settings else nearest_name(name, [*arguments, *settings])
            if near in arguments:
                raise ConfigError(f"{function.__name__}() has no argument {name!r}. Did you mean {near!r}?")

    @classmethod
    def _spellings(cls) -> dict[str, str]:
        """Return the canonical names by all names that are accepted or used in other frameworks."""
        names = {name: name for name in cls.model_fields} | dict(cls.SYNONYMS)
        if cls.GROUP and not cls.SYNONYMS:  # a group within the training settings
            for other, meant in SYNONYMS.items():
                group, _, last = meant.rpartition(".")
                if last in cls.model_fields and group in ("", cls.GROUP):
                    names |= {other: last, other.removeprefix(f"{cls.GROUP}_"): last}
        return names

    @classmethod
    def _unknown(cls, name: str) -> str:
        """Return advice about an unknown setting."""
        within, spellings = f"{cls.GROUP}." if cls.GROUP else "", cls._spellings()
        if name in cls.SETTING_HINTS:
            return cls.SETTING_HINTS[name]
        if name in cls.SYNONYMS:  # it is also given under its canonical name
            return f"It is called {within + cls.SYNONYMS[name]!r} here."
        near = nearest_name(name, spellings)
        if near is not None:
            return f"Did you mean {within + spellings[near]!r}?"
        return f"There are: {', '.join(within + one for one in sorted(cls.model_fields))}."

    @classmethod
    def _error_message(cls, detail: ErrorDetails) -> str:
        parts = [str(part) for part in detail["loc"]]
        name = ".".join(([cls.GROUP] if cls.GROUP else []) + parts)
        if detail["type"] == "extra_forbidden":
            return f"There is no training setting {name!r}. {cls._unknown(parts[-1])}"
        if not name:
            return f"{brief(detail['input'])} is not a mapping from names of settings to values."
        if detail["type"] == "missing":
            return f"{name} is required and missing."
        if detail["type"] in ("model_type", "model_attributes_type") and not parts:
            return (
                f"{name}={brief(detail['input'])}: this is a group of settings. Set one or more of them, such "
                f"as {next(iter(cls.model_fields))}. There are: {', '.join(cls.model_fields)}."
            )
        return f"{name}={brief(detail['input'])}: {detail['msg'][:1].lower()}{detail['msg'][1:]}."


def _is_group(annotation: Any) -> bool:
    """Return whether a field is a group of settings, which validates itself."""
    return any(isinstance(one, type) and issubclass(one, BaseConfig) for one in (annotation, *get_args(annotation)))
