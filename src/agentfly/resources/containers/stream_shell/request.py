"""Requests to the keeper of a shell, as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

NO_INPUT = "/dev/null"
_PIECE = 32 * 1024


def request(
    nonce: str,
    kind: str,
    *,
    number: int = 0,
    argument: object = 0,
    holder: object = 0,
    known: Iterable[int | str] = (),
    stdin: str = NO_INPUT,
    data: bytes = b"",
) -> bytes:
    """One request. What the fields mean depends on its kind, and is in ``keeper.sh``."""
    fields = (nonce, kind, number, argument, holder, stdin, len(data), *known)
    return " ".join(map(str, fields)).encode() + b"\0" + data


def pieces(content: bytes) -> Iterator[bytes]:
    """What brings bytes inside, piece by piece: bash reads no NUL, so they are written as its printf has it."""
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        yield piece.replace(b"\\", b"\\\\").replace(b"\0", b"\\0000")
