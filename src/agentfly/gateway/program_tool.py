"""ProgramTool: a tool that a program describes and runs itself, as tool-call formats ask about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class ProgramArgument:
    """One argument that the model gives."""

    name: str
    required: bool
    description: str


@dataclass(frozen=True)
class ProgramSchema:
    """The arguments of a program's tool, from its JSON schema."""

    json_schema: Mapping[str, Any]

    @property
    def arguments(self) -> tuple[ProgramArgument, ...]:
        """The arguments, in order."""
        required = self.json_schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
        return tuple(
            ProgramArgument(name, name in needed, str(self._about(name).get("description") or ""))
            for name in self.json_schema.get("properties") or {}
        )

    def type_of(self, name: str) -> str:
        """The type of an argument, in a word."""
        kind = self._about(name).get("type", "any")
        return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)

    def _about(self, name: str) -> Mapping[str, Any]:
        """The schema of an argument. One of ``true`` takes any value."""
        about = (self.json_schema.get("properties") or {}).get(name)
        return about if isinstance(about, Mapping) else {}


@dataclass(frozen=True, repr=False)
class ProgramTool:
    """A tool of a program.

    Attributes:
        name: what the model calls it.
        description: what it does.
        definition: the tool as chat templates want it described.
    """

    name: str
    description: str
    definition: Mapping[str, Any]

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Self:
        """The tool of a definition, which has been checked."""
        function = definition["function"]
        return cls(function["name"], str(function.get("description") or ""), definition)

    def __repr__(self) -> str:
        return f"<tool {self.name:.100}>"

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        parameters: Mapping[str, Any] = self.definition["function"].get("parameters") or {"type": "object"}
        return parameters

    @property
    def schema(self) -> ProgramSchema:
        """Its arguments."""
        return ProgramSchema(self.parameters)
