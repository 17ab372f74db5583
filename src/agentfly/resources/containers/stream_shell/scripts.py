"""The scripts that run inside a sandbox, on the side of the shell that is there. They need bash and nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from agentfly.resources.containers.spec import INSIDE

MARK = b"\x1e%s "
"""What a report begins with; its name in between."""
KEEPER = ["/bin/bash", "-c", 'IFS= read -r -d "" keeper && eval "$keeper"', "agentfly"]
"""The command line of a keeper, which is told on its input what to do."""


@dataclass(frozen=True)
class Scripts:
    """The scripts of one shell.

    Args:
        nonce: by which reports and requests of this shell are known; letters and digits.
        place: the directory, inside, for what belongs to the shell.
    """

    nonce: str
    place: str = str(INSIDE)

    @property
    def mark(self) -> bytes:
        """What each report begins with."""
        return MARK % self.nonce.encode()

    def keeper(self, drop: Sequence[str] = (), owner: str = "", owned: Sequence[str] = ()) -> bytes:
        """What the keeper is to be told first, on its input.

        Args:
            drop: words before a program that take away the rights that the keeper has and the agent must not have.
            owner: who is to own the `owned` directories, as ``chown`` takes it; empty for nobody.
            owned: directories, emptied by a reset with their owner kept.
        """
        session, alone = self._source("held", "session"), self._source("held", "alone")
        arguments = (session, alone, owner, "\n".join(owned), *drop)
        return f"set -- {shlex.join(arguments)}\n{self._source('keeper')}".encode("utf-8", "surrogateescape") + b"\0"

    def holder(self) -> list[str]:
        """The command line of a program that does no more than hold outputs open."""
        return ["/bin/bash", "-c", self._source("holder")]

    def _source(self, *names: str) -> str:
        text = "".join(map(_text, names)).replace("@SERVE@", _text("serve"))
        return (
            text.replace("@MARK@", f"\\x1e{self.nonce} ").replace("@NONCE@", self.nonce).replace("@PLACE@", self.place)
        )


@cache
def _text(name: str) -> str:
    return files(__package__).joinpath(f"{name}.sh").read_text()
