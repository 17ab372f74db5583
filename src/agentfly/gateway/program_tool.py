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
        required = self.json_schema.get("required") or ()
        properties = self.json_schema.get("properties") or {}
        return tuple(
            ProgramArgument(name, name in required, str(about.get("description") or ""))
            for name, about in properties.items()
        )

    def type_of(self, name: str) -> str:
        """The type of an argument, in a word."""
        return str(self.json_schema.get("properties", {}).get(name, {}).get("type", "any"))


@dataclass(frozen=True)
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

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        parameters: Mapping[str, Any] = self.definition["function"].get("parameters") or {"type": "object"}
        return parameters

    @property
    def schema(self) -> ProgramSchema:
        """Its arguments."""
        return ProgramSchema(self.parameters)
