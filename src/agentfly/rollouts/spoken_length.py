"""SpokenLength: how many tokens of a model a scripted rollout would take, and whether the agent's limits leave them.

The tokens of a script are no model's, so limits on tokens do not bind it. This says whether a model could say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentfly.agents.agent import Agent
from agentfly.agents.subagent import Subagent
from agentfly.errors import ConfigError
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.rendering import Renderer
from agentfly.trajectory import Trajectory


@dataclass(frozen=True)
class SpokenLength:
    """Tokens that a rollout takes when a model says what a script has said.

    Attributes:
        turn: the most tokens of a turn, its end included.
        sequence: the most tokens of a sequence: prompt, turns and observations.
        beyond: each limit of the agent that is too low for it, in words.
    """

    turn: int
    sequence: int
    beyond: tuple[str, ...]

    @classmethod
    def of(
        cls, trajectory: Trajectory, agent: Agent, tokenizer: Tokenizer, *, strategy: str, context_length: int
    ) -> SpokenLength:
        """The length of a rollout in the tokens of a model, in its chat format.

        Args:
            trajectory: the rollout.
            agent: the agent that was rolled out, with the model.
            tokenizer: the model's.
            strategy: how turns become token sequences.
            context_length: the most tokens that the model can hold.

        Raises:
            NotRendered: the conversation cannot be written for the model; the message says why.
            ConfigError: the agent's memory shows its model something else than the conversation.
            ChatFormatError: the model's chat template cannot carry the agent's conversations.
        """
        rendered = Renderer(agent, tokenizer, strategy=strategy, max_tokens=context_length).render(trajectory)
        limits = dict(_agents(agent, ""))
        spoken = [turn for turn in rendered.turns if turn.sequence >= 0]
        beyond: dict[str, str] = {}
        sampled: dict[str, int] = {}
        for turn in spoken:
            own, tokens = limits[turn.agent], turn.stop - turn.start
            whole = len(rendered.sequences[turn.sequence])
            sampled[turn.conversation] = sampled.get(turn.conversation, 0) + tokens
            for name, limit, needed, what in (
                ("max_tokens_per_turn", own.max_tokens_per_turn, tokens, f"turn {turn.index + 1} takes"),
                ("max_sequence_tokens", own.max_sequence_tokens, whole, "the conversation takes"),
                ("max_sampled_tokens", own.max_sampled_tokens, sampled[turn.conversation], "the turns take"),
            ):
                if limit is not None and needed > limit:
                    beyond[name] = f"{what} {needed} tokens of the model, and {name} is {limit}"
        return cls(
            max((turn.stop - turn.start for turn in spoken), default=0),
            max(map(len, rendered.sequences), default=0),
            tuple(beyond.values()),
        )

    def require_room(self) -> None:
        """Raise unless the agent's limits leave room.

        Raises:
            ConfigError: they do not.
        """
        if self.beyond:
            raise ConfigError(
                f"The model could not say what the oracle says: {'; '.join(self.beyond)}. Raise the limit, or have the "
                "oracle say less."
            )


def _agents(agent: Agent, path: str) -> Iterator[tuple[str, Agent]]:
    """The agent and its subagents, by the paths by which turns name them."""
    yield path, agent
    for tool in agent.tools:
        if isinstance(tool, Subagent):
            yield from _agents(tool.agent, "/".join(filter(None, (path, tool.name))))
