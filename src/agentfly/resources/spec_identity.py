"""What makes two specs the same: equal values of the same types, however deep they lie."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields
from datetime import datetime, time
from decimal import Decimal
from typing import Any

_BY_REPR = (float, complex, Decimal, datetime, time)
"""Types of which different values are equal, such as -0.0 and 0.0, or the same moment in two time zones."""


def typed_key(value: Any) -> Hashable:
    """A key that is equal for two values only if their types are equal too.

    ``1``, ``1.0`` and ``True`` are equal to Python, and so are tuples of them. To what they are passed to they may be
    three different things. What lies in tuples, frozen sets and dataclasses is told apart as well; of other objects,
    the type and their own equality count. A value that cannot be hashed makes a key that cannot be hashed.
    """
    kind = type(value)
    if isinstance(value, tuple):
        return (kind, *map(typed_key, value))
    if isinstance(value, frozenset):
        return (kind, frozenset(map(typed_key, value)))
    if kind in _BY_REPR:
        return (kind, repr(value))
    params = None if isinstance(value, type) else getattr(value, "__dataclass_params__", None)
    if params is not None and params.eq:
        return (kind, value, *_typed_fields(value))
    return (kind, value)


def _typed_fields(value: Any) -> Iterator[Hashable]:
    """The fields that its own equality compares, without those that it takes care of hashing itself."""
    for field in fields(value):
        key = typed_key(getattr(value, field.name)) if field.compare else None
        try:
            hash(key)
        except TypeError:
            continue
        yield key
