"""Classic BPF (seccomp(2)): small programs that the kernel runs at each system call, put together from named places."""

from __future__ import annotations

import struct
from dataclasses import dataclass

LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ABOVE, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
NUMBER, ARCHITECTURE = 0, 4
"""Offsets in struct seccomp_data."""

ALLOW, REFUSE, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
"""Answers; an error number is added to that which refuses."""


def argument(index: int) -> int:
    """The offset of the lower half of an argument; the upper half comes four bytes later (little-endian)."""
    return 16 + 8 * index


@dataclass(frozen=True)
class Instruction:
    """An instruction.

    Args:
        code: what it does.
        value: what it compares with, loads from, or returns.
        then: the place to go on at if a comparison holds; empty for the next instruction.
        otherwise: the same if it does not hold.
        place: the name of its own place; empty if nothing leads here.
    """

    code: int
    value: int
    then: str = ""
    otherwise: str = ""
    place: str = ""


def assembled(program: list[Instruction]) -> bytes:
    """The program as the kernel reads it.

    Raises:
        ValueError: a jump leads backwards, or further than 255 instructions, which is the most that there can be.
    """
    places = {instruction.place: at for at, instruction in enumerate(program) if instruction.place}

    def distance(at: int, place: str) -> int:
        far = places[place] - at - 1 if place else 0
        if not 0 <= far < 256:
            raise ValueError(f"no instruction can jump by {far}, to {place}")
        return far

    return b"".join(
        struct.pack("=HBBI", one.code, distance(at, one.then), distance(at, one.otherwise), one.value)
        for at, one in enumerate(program)
    )
