"""Settings: the base of every group of training settings. Frozen, typed, and strict about names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from agentfly.errors import ConfigError, nearest_name
from agentfly.json_values import brief
from agentfly.training.config.synonyms import SYNONYMS as OF_TRAINING
from agentfly.training.config.synonyms import with_canonical_names

_log = logging.getLogger("agentfly")


class Settings(BaseModel):
    """A group of settings that says what is wrong with a value in its own words.

    Raises:
        ConfigError: a setting is unknown (the message has the nearest name), out of its range, or contradicts another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    GROUP: ClassVar[str] = ""
    """What the group is called among the training settings, such as ``kl``; empty for the training settings."""
    SYNONYMS: ClassVar[Mapping[str, str]] = {}
    """The settings by what other frameworks call them; they are taken under these names too."""
    EXPLAINED: ClassVar[Mapping[str, str]] = {}
    """What to set in place of settings of other frameworks that have no counterpart of the same meaning."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse ``yes`` and ``true``, which YAML reads as a truth value and Python as the number 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation is not bool and not _is_group(annotation):
            raise PydanticCustomError("no_truth_value", "Input should not be a truth value")
        return value

    @model_validator(mode="before")
    @classmethod
    def _by_canonical_names(cls, values: Any) -> Any:
        """Take a setting under the name that other frameworks have for it, and say what it is called here."""
        return cls.canonical(values) if isinstance(values, Mapping) else values

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, value: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            raise ConfigError("\n".join(map(cls._complaint, error.errors()))) from None

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under the names that they have here; a warning tells which were given under another name."""
        settings, renamed = with_canonical_names(values, cls.model_fields, cls.SYNONYMS)
        within = f"{cls.GROUP}." if cls.GROUP else ""
        for given, name in renamed.items():
            _log.warning("The setting %s%s is called %s%s here, and is read as that.", within, given, within, name)
        return settings

    @classmethod
    def refuse_misspelled(cls, function: Callable[..., Any], given: Iterable[str]) -> None:
        """Refuse what is no setting and was likely meant for another argument of the function that takes settings.

        Raises:
            ConfigError: there is such an argument; the message has the one that was likely meant.
        """
        settings = [*cls.model_fields, *cls.SYNONYMS, *cls.EXPLAINED]
        arguments = [name for name in signature(function).parameters if name != "settings"]
        for name in given:
            near = None if name in settings else nearest_name(name, [*arguments, *settings])
            if near in arguments:
                raise ConfigError(f"{function.__name__}() has no argument {name!r}. Did you mean {near!r}?")

    @classmethod
    def _spellings(cls) -> dict[str, str]:
        """The settings by all names that they may be given under, or that they have elsewhere."""
        names = {name: name for name in cls.model_fields} | dict(cls.SYNONYMS)
        if cls.GROUP and not cls.SYNONYMS:  # a group within the training settings
            for other, meant in OF_TRAINING.items():
                group, _, last = meant.rpartition(".")
                if last in cls.model_fields and group in ("", cls.GROUP):
                    names |= {other: last, other.removeprefix(f"{cls.GROUP}_"): last}
        return names

    @classmethod
    def _unknown(cls, name: str) -> str:
        """What to do about a setting that there is not."""
        within, spellings = f"{cls.GROUP}." if cls.GROUP else "", cls._spellings()
        if name in cls.EXPLAINED:
            return cls.EXPLAINED[name]
        if name in cls.SYNONYMS:  # which is given under its own name, too
            return f"It is called {within + cls.SYNONYMS[name]!r} here."
        near = nearest_name(name, spellings)
        if near is not None:
            return f"Did you mean {within + spellings[near]!r}?"
        return f"There are: {', '.join(within + one for one in sorted(cls.model_fields))}."

    @classmethod
    def _complaint(cls, detail: ErrorDetails) -> str:
        parts = [str(part) for part in detail["loc"]]
        name = ".".join(([cls.GROUP] if cls.GROUP else []) + parts)
        if detail["type"] == "extra_forbidden":
            return f"There is no training setting {name!r}. {cls._unknown(parts[-1])}"
        if not name:
            return f"{brief(detail['input'])} holds no settings by their names."
        if detail["type"] == "missing":
            return f"{name} is needed and is missing."
        if detail["type"] in ("model_type", "model_attributes_type") and not parts:
            return (
                f"{name}={brief(detail['input'])}: this is a group of settings, of which some have to be given, such "
                f"as {next(iter(cls.model_fields))}. There are: {', '.join(cls.model_fields)}."
            )
        return f"{name}={brief(detail['input'])}: {detail['msg'][:1].lower()}{detail['msg'][1:]}."


def _is_group(annotation: Any) -> bool:
    """Whether a field holds settings of its own, which say themselves what they take."""
    return any(isinstance(one, type) and issubclass(one, Settings) for one in (annotation, *get_args(annotation)))
