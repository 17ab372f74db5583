"""Emit: how the parts of an engine tell whoever listens what happens to a pool."""

from __future__ import annotations

from typing import Any, Protocol

from agentfly.events import ResourceEvent
from agentfly.resources.spec import ResourceSpec


class Emit(Protocol):
    """Tells whoever listens that something happened to the pool of a spec."""

    def __call__(self, event: type[ResourceEvent], spec: ResourceSpec[Any], **fields: Any) -> None: ...
