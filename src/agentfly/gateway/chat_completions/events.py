"""Server-sent events, which streams consist of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event that holds JSON."""
    return f"data: {json.dumps(value)}\n\n".encode()
