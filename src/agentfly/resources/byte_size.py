"""Sizes in bytes, as people write them."""

from __future__ import annotations

from agentfly.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as ``"512MiB"``, ``"2GB"`` or ``1024``.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    text = str(size).strip().lower()
    number = text.rstrip("bkmgti ")
    unit = text[len(number) :].strip()
    try:
        count = int(float(number) * _UNITS[unit])
        if count < 0:
            raise ValueError(size)
        return count
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"{size!r} is not a size in bytes. Write a number and a unit, for instance '512MiB' or '2GB'."
        ) from None
