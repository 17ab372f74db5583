"""ExchangeTree: the exchanges of a rollout, found by the conversations that go on from them."""

from __future__ import annotations

from agentfly.gateway.exchange import Exchange
from agentfly.gateway.model_request import ModelRequest, same_message


class ExchangeTree:
    """The exchanges of a rollout.

    To find one takes a time that grows with the request, and hardly with how many exchanges there are.
    """

    def __init__(self) -> None:
        self._by_hash: dict[int, list[Exchange]] = {}
        self._beginnings: dict[int, Exchange] = {}

    def add(self, exchange: Exchange) -> None:
        """Another exchange."""
        self._by_hash.setdefault(exchange.hash, []).append(exchange)
        if exchange.parent is not None:
            exchange.parent.continued = True
        else:
            self._beginnings.setdefault(exchange.asked_hash, exchange)

    def continued_by(self, request: ModelRequest) -> Exchange | None:
        """The exchange that a request continues, the deepest one.

        Of several that said the same, it is one that nothing has continued yet.
        """
        for length in range(len(request.conversation) - 1, 0, -1):
            fitting = self._by_hash.get(request.hashes[length], ())
            for exchange in sorted(fitting, key=lambda one: one.continued or one.branch.busy):
                if exchange.length == length and _is_repeated(exchange, request):
                    return exchange
        return None

    def same_beginning(self, request: ModelRequest) -> Exchange | None:
        """The exchange by which the same conversation was begun before, if it was."""
        found = self._beginnings.get(request.hashes[-1])
        if found is None or len(found.new) != len(request.conversation):
            return None
        return found if all(map(same_message, found.new, request.conversation)) else None


def _is_repeated(exchange: Exchange, request: ModelRequest) -> bool:
    """Whether a request begins with the conversation of an exchange."""
    return all(map(same_message, exchange.conversation, request.conversation))
