"""The memories by name, as a configuration writes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from agentfly.agents.memory.memory import FullHistory, Memory
from agentfly.agents.memory.summary_folding import SummaryFolding
from agentfly.agents.memory.window import Window
from agentfly.errors import ConfigError, did_you_mean

_KINDS: dict[str, type[Memory]] = {"full": FullHistory, "window": Window, "summary": SummaryFolding}


def memory_from(kind: str, settings: Mapping[str, Any]) -> Memory:
    """A memory of a kind: ``full``, ``window`` or ``summary``, with its settings.

    Raises:
        ConfigError: there is no such kind, it has no such setting, or a setting has a value that it cannot have.
    """
    if kind not in _KINDS:
        raise ConfigError(f"There is no memory {kind!r}. {did_you_mean(kind, _KINDS)}")
    made = _KINDS[kind]
    known = inspect.signature(made).parameters
    for name in settings:
        if name not in known:
            raise ConfigError(f"The memory {kind!r} has no setting {name!r}. {did_you_mean(name, known)}")
    try:
        return made(**settings)
    except TypeError as error:
        raise ConfigError(f"The memory {kind!r} cannot be made of {dict(settings)!r}: {error}.") from None
