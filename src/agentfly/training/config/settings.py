"""Settings: the base of every group of training settings. Frozen, typed, and strict about names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from agentfly.errors import ConfigError, did_you_mean
from agentfly.training.config.synonyms import EXPLAINED, SYNONYMS, with_canonical_names

_log = logging.getLogger("agentfly")


class Settings(BaseModel):
    """A group of settings that says what is wrong with a value in its own words.

    Raises:
        ConfigError: a setting is unknown (the message has the nearest name), out of its range, or contradicts another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    GROUP: ClassVar[str] = ""
    """What the group is called among the training settings, such as ``kl``; empty for the training settings."""

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
        if cls.GROUP or not isinstance(values, Mapping):
            return values
        settings, renamed = with_canonical_names(values, cls.model_fields)
        for given, name in renamed.items():
            _log.warning("The training setting %s is called %s here, and is read as that.", given, name)
        return settings

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, value: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            complaints = [_complaint(detail, cls.GROUP, cls.model_fields) for detail in error.errors()]
            raise ConfigError("\n".join(complaints)) from None


def _is_group(annotation: Any) -> bool:
    """Whether a field holds settings of its own, which say themselves what they take."""
    return any(isinstance(one, type) and issubclass(one, Settings) for one in (annotation, *get_args(annotation)))


def _complaint(detail: ErrorDetails, group: str, known: Mapping[str, Any]) -> str:
    parts = [str(part) for part in detail["loc"]]
    name = ".".join(([group] if group else []) + parts)
    if detail["type"] == "extra_forbidden":
        within = name.removesuffix(parts[-1])
        cure = EXPLAINED.get(name) or (f"It is called {SYNONYMS[name]!r} here." if name in SYNONYMS else "")
        cure = cure or did_you_mean(name, [within + one for one in sorted(known)])
        return f"There is no training setting {name!r}. {cure}"
    if not name:
        return f"{detail['input']!r} holds no settings by their names."
    if detail["type"] == "missing":
        return f"{name} is needed and is missing."
    if detail["type"] in ("model_type", "model_attributes_type") and not parts:
        first = next(iter(known))
        return (
            f"{name}={detail['input']!r}: this is a group of settings, of which some have to be given, such as "
            f"{first}. There are: {', '.join(known)}."
        )
    return f"{name}={detail['input']!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}."
