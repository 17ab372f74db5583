"""Routes: which server each rollout is sent to."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection


class Routes:
    """Sends all generations of a rollout to one server, where the keys and values of its earlier turns are.

    A new rollout goes to the server with the fewest rollouts; among equals to the one with the highest hash of server
    and rollout (rendezvous hashing), which is the same in every process and however the servers are listed. When a
    server goes, only its own rollouts move.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._loads: Counter[str] = Counter()

    def place(self, rollout_id: str, servers: Collection[str]) -> str:
        """The server of a rollout.

        Args:
            rollout_id: the rollout.
            servers: names of those that can be used, at least one.
        """
        at = self._places.get(rollout_id)
        if at is not None:
            if at in servers:
                return at
            self.forget(rollout_id)
        chosen = min(servers, key=lambda server: (self._loads[server], -_weight(server, rollout_id)))
        self._places[rollout_id] = chosen
        self._loads[chosen] += 1
        return chosen

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended."""
        if (at := self._places.pop(rollout_id, None)) is not None:
            self._loads[at] -= 1

    @property
    def loads(self) -> dict[str, int]:
        """How many rollouts each server has."""
        return {server: load for server, load in self._loads.items() if load}


def _weight(server: str, rollout_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{server}\0{rollout_id}".encode(), digest_size=8).digest())
