"""Thoughts: what a model thinks in a turn, told apart from what it says."""

from __future__ import annotations

from dataclasses import dataclass

OPENERS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""What begins and ends thoughts in the templates of most models; the second pair is Mistral's."""


@dataclass(frozen=True)
class Thoughts:
    """How a model's turns hold thoughts.

    Attributes:
        opener: what begins them, without white space around it.
        closer: what ends them.
        opened: whether the header of a turn opens them, so that the turn itself only ends them.
    """

    opener: str = "<think>"
    closer: str = "</think>"
    opened: bool = False

    def split(self, text: str, *, opened: bool | None = None) -> tuple[str | None, str]:
        """The thoughts of a turn, None where there are none, and what is said.

        Thoughts that are never closed go on to the end.

        Args:
            text: the turn.
            opened: whether thoughts may be open from the beginning on; None for what the header does.
        """
        begun = text.lstrip()
        explicit = begun.startswith(self.opener)
        thoughts, closed, said = begun.removeprefix(self.opener).partition(self.closer)
        if closed and (explicit or (self.opened and self.opener not in thoughts)):
            return thoughts.strip("\n"), said.lstrip("\n")
        if explicit or (self.opened if opened is None else opened):
            return thoughts.strip("\n"), ""
        return None, text

    def join(self, thoughts: str, said: str) -> str:
        """A turn's text out of its thoughts and what is said."""
        return f"{self.opener}\n{thoughts}\n{self.closer}\n\n{said}"

    def unmarked(self, text: str) -> str:
        """A text without the marks of thoughts and white space around it."""
        return text.replace(self.opener, "").replace(self.closer, "").strip()

    def unopened(self, header: str) -> str:
        """The header of a turn without the marks of thoughts at its end: those that open them, or leave them out."""
        bare = header
        while (text := bare.rstrip()).endswith((self.opener, self.closer)):
            bare = text.removesuffix(self.opener).removesuffix(self.closer)
        return bare
