"""The fields of a configuration, listed from the classes that hold them and found by name."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentfly.core.errors import nearest_name
from agentfly.training.config.base import BaseConfig


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of a configuration.

    Attributes:
        key: its whole key, such as ``training.kl.coefficient``, as it is overridden on the command line.
        kind: its type as text: ``int > 0``, ``chain | step``, ``str or null``; a group is ``group``.
        default: the value if not given; ``required`` if it must be given.
        meaning: its purpose, from its docstring.
    """

    key: str
    kind: str
    default: str
    meaning: str

    @property
    def name(self) -> str:
        """The key within its group."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class ConfigFieldGroup:
    """Fields that belong together.

    Attributes:
        key: the prefix of their keys; empty for the fields of the run itself.
        title: name of the class that holds them.
        about: the first paragraph of its docstring.
        fields: the fields, in their order.
    """

    key: str
    title: str
    about: str
    fields: tuple[ConfigField, ...]

    def markdown(self) -> str:
        """Return the fields as a Markdown table."""
        rows = ["| field | default | meaning |", "|---|---|---|"]
        for field in self.fields:
            default = field.default if field.default in ("required", "see below") else f"`{field.default}`"
            rows.append(f"| `{field.name}` | {default} | {field.meaning} |")
        return "\n".join(rows)


@cache
def field_groups(model: type[BaseModel]) -> tuple[ConfigFieldGroup, ...]:
    """Return all fields of a configuration class in groups, outer groups first."""
    return tuple(_groups(model, ""))


def find_field(name: str, model: type[BaseModel]) -> str | None:
    """Return the full key of the field with this name or synonym; None if there is none.

    ``steps`` names ``training.steps``, and ``lr`` is a synonym of ``training.learning_rate``.
    """
    return next((meant for key, meant in _spellings(model).items() if key == name or key.endswith(f".{name}")), None)


def nearest_field(name: str, model: type[BaseModel]) -> str | None:
    """Return the full key of the field that an unknown key likely meant; None if none is near."""
    group, _, last = name.rpartition(".")
    spellings = _spellings(model)
    alike = [key for key in spellings if key.rpartition(".")[2] == last]
    if alike:  # in another group
        return spellings[difflib.get_close_matches(name, alike, n=1, cutoff=0.0)[0] if group else alike[0]]
    beside: dict[str, str] = {}
    anywhere: dict[str, str] = {}
    for key, meant in spellings.items():
        within, _, spelled = key.rpartition(".")
        anywhere.setdefault(spelled, meant)
        if within == group:
            beside[spelled] = meant
    for wanted, among in ((last, beside), (last, anywhere), (name, spellings)):
        near = nearest_name(wanted, among)
        if near is not None:
            return among[near]
    return None


@cache
def _spellings(model: type[BaseModel]) -> dict[str, str]:
    """Return the full keys of all fields by themselves and by the synonyms of other frameworks."""
    keys = {field.key: field.key for group in field_groups(model) for field in group.fields}
    return keys | {
        f"{group}.{name}": f"{group}.{meant}"
        for group, info in model.model_fields.items()
        for settings in _flat(info.annotation)
        if isinstance(settings, type) and issubclass(settings, BaseConfig)
        for name, meant in settings.SYNONYMS.items()
    }


def _groups(model: type[BaseModel], prefix: str) -> Iterator[ConfigFieldGroup]:
    fields, within = [], []
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        groups = [one for one in _flat(info.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        within += [(group, f"{key}.") for group in groups]
        meaning = " ".join((info.description or "").split())
        meaning = re.sub(r"\bNone\b", "`null`", meaning)  # as a file writes it
        fields.append(ConfigField(key, _kind(info), _default(info, bool(groups)), meaning))
    about = " ".join((model.__doc__ or "").partition("\n\n")[0].split())
    yield ConfigFieldGroup(prefix.rstrip("."), model.__name__, about, tuple(fields))
    for group, inner in within:
        yield from _groups(group, inner)


def _default(info: FieldInfo, group: bool) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "null"
    return "see below" if group else str(value)


def _kind(info: FieldInfo) -> str:
    return _type_text(info.annotation) + _bounds(info.metadata)


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0]) + _bounds(arguments[1:])
    if origin in (Union, types.UnionType):
        parts = list(dict.fromkeys(_type_text(one) for one in arguments if one is not type(None)))
        return " | ".join(parts) + (" or null" if type(None) in arguments else "")
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is not None:
        return "list" if origin in (tuple, list) else "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "group"
    return str(getattr(annotation, "__name__", annotation))


def _bounds(constraints: Iterable[Any]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    flat = [inner for one in constraints for inner in getattr(one, "metadata", None) or [one]]
    bounds = [
        f"{sign} {getattr(one, name)}"
        for one in flat
        for name, sign in signs.items()
        if getattr(one, name, None) is not None
    ]
    return f" {', '.join(bounds)}" if bounds else ""


def _flat(annotation: Any) -> Iterator[Any]:
    """Return the types within an annotation."""
    arguments = get_args(annotation)
    if not arguments or get_origin(annotation) is Literal:
        yield annotation
    for one in arguments if get_origin(annotation) is not Literal else ():
        yield from _flat(one)
