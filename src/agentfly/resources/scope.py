"""Scope: how long a lease lasts."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn

from agentfly.errors import UsageError


class Scope(StrEnum):
    """How long a lease lasts."""

    CALL = "call"  # this tool call
    ROLLOUT = "rollout"  # until the rollout ends
    GLOBAL = "global"  # shared by many owners, until the engine closes or it idles out

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise UsageError(f"scope={value!r}: write one of {', '.join(repr(scope.value) for scope in cls)}.")
