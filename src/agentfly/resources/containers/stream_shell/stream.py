"""Stream: the input and the two outputs of a program in a sandbox, wherever that is."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Stream(ABC):
    """A program's input and outputs, for one reader and any number of writers."""

    @abstractmethod
    async def read(self) -> tuple[int, bytes] | None:
        """What came next, and on which of its outputs: 1 or 2. None once the program, or the way to it, has ended."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Give it input; what is given at once stays together.

        Raises:
            OSError: it takes none any more.
        """

    @abstractmethod
    async def end_input(self) -> None:
        """Have the program find the end of its input.

        Raises:
            OSError: it takes none any more.
        """

    @abstractmethod
    async def close(self) -> None:
        """End its input, and let go of it. Fine if it is closed."""
