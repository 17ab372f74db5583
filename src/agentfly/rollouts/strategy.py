"""Strategy: how the turns of a conversation become token sequences, and the strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from agentfly.errors import ConfigError, did_you_mean
from agentfly.messages import Message
from agentfly.rollouts.chain import Chain
from agentfly.rollouts.chat.chat_format import ChatFormat, Definitions
from agentfly.rollouts.step import Step
from agentfly.rollouts.tape import Tape


class Strategy(Protocol):
    """Puts on a `Tape` what is sent for the next turn of one conversation."""

    def show(self, view: Sequence[Message], tools: Definitions = ()) -> None:
        """Put on the tape what the policy is to see before its next turn.

        Args:
            view: the conversation as the agent's memory recalls it.
            tools: the tools that the chat format is to describe.
        """
        ...

    def length(self, view: Sequence[Message], tools: Definitions = ()) -> int:
        """How many tokens the policy would see if ``view`` were shown now. Nothing is put on the tape."""
        ...

    def replied(self, message: Message) -> None:
        """The policy has answered what was shown last; ``message`` is the answer as it stands in the conversation."""
        ...


STRATEGIES: Mapping[str, Callable[[ChatFormat, Tape], Strategy]] = {"chain": Chain, "step": Step}
"""The strategies by name."""


def require_strategy(name: str) -> None:
    """Raise unless there is a strategy of this name.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigError(f"strategy={name!r}: there is no such strategy. {did_you_mean(str(name), STRATEGIES)}")
