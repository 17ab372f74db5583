"""Labels: how an engine's containers and images are known to be ours, and whose."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from agentfly.resources.identity import ProcessIdentity

INSTANCE = "agentfly.instance"
OWNER = "agentfly.owner"


def labels(instance: str) -> dict[str, str]:
    """What everything that belongs to an instance is known by."""
    return {INSTANCE: instance, OWNER: owner_label()}


def by_instance(instance: str) -> dict[str, list[str]]:
    """A filter of what belongs to an instance, for listings."""
    return {"label": [f"{INSTANCE}={instance}"]}


def owner_label() -> str:
    """What this process is known by to later ones."""
    return "|".join(str(value) for value in asdict(ProcessIdentity.here()).values())


def owner_of(label: str) -> ProcessIdentity | None:
    """The process that a label names; None if it names none."""
    words: list[Any] = label.split("|")
    if len(words) != len(fields(ProcessIdentity)) or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    return ProcessIdentity(int(words[0]), int(words[1]), *words[2:])
