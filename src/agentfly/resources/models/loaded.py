"""Loaded: what a server has been given since its start, so that the next run of it has that too."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentfly.resources.models.token_server import LOAD_WEIGHTS, TokenServer


@dataclass
class Loaded:
    """What was put into a server.

    Attributes:
        weights: the directory of the weights that were put in the place of its own; None if none were.
        by: the worker's method that did it.
        label: what the weights were called; None if they were not.
        adapters: directories of LoRA adapters, by name.
    """

    weights: str | None = None
    by: str = LOAD_WEIGHTS
    label: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)

    async def give(self, server: TokenServer) -> None:
        """Have a fresh server hold all of it. Errors are those of `TokenServer`."""
        if self.weights is not None:
            await server.load_weights(self.weights, by=self.by)
            await server.forget_prompts()
        await self.give_adapters(server)
        if self.label is not None:
            await server.label_weights(self.label)

    async def give_adapters(self, server: TokenServer) -> None:
        """Have a server hold the adapters, which a change of weights drops."""
        for name, path in self.adapters.items():
            await server.load_adapter(name, path)
