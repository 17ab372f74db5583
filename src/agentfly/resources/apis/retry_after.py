"""Retry-After: when the far side wants to be asked again (RFC 9110, section 10.2.3)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until the far side wants to be asked again; None when it does not say, or not so that it can be read.

    A date is taken relative to the answer's own ``Date``, so that clocks that differ do no harm.

    Args:
        headers: of the answer; looked up in lower case.
    """
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:  # some endpoints are more exact
        return milliseconds / 1000
    text = headers.get("retry-after")
    if (seconds := _number(text)) is not None:
        return seconds
    if (then := _timestamp(text)) is None:
        return None
    now = _timestamp(headers.get("date"))
    return max(0.0, then - (time.time() if now is None else now))


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _timestamp(text: str | None) -> float | None:
    try:
        date = parsedate_to_datetime(text or "")
        return (date if date.tzinfo else datetime.replace(date, tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
