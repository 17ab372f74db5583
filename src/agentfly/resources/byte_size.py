"""Sizes in bytes, as people write them."""

from __future__ import annotations

from agentfly.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
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
    """Bytes of a size such as ``"512MiB"``, ``"2GB"``, ``"1Gi"`` or ``1024``.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    text = str(size).strip().lower()
    number = text.rstrip("bkmgti ")
    unit = text[len(number) :].strip()
    try:
        count = float(number)
        if unit in ("k", "m", "g", "t"):
            raise ConfigError(
                f"{size!r} is not a size in bytes, because a unit of one letter counts by 1024 to some programs, such "
                f"as Docker, and by 1000 to others, such as Kubernetes. Write '{number.strip()}{unit.upper()}iB' or "
                f"'{number.strip()}{unit.upper()}B'."
            )
        if (bytes_ := int(count * _UNITS[unit])) < 0:
            raise ValueError(size)
        return bytes_
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"{size!r} is not a size in bytes. Write a number and a unit, for instance '512MiB' or '2GB'."
        ) from None
