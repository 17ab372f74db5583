"""Scope: how long a lease lasts."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """How long a lease lasts."""

    CALL = "call"  # this tool call
    ROLLOUT = "rollout"  # until the rollout ends
    GLOBAL = "global"  # shared by many owners, until the engine closes or it idles out
