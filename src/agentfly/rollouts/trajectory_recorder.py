"""Trajectory recorder: writes the turns of a rollout into its trajectory, with their anchors, and emits the events."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from agentfly.core.events import EventStream, GenerationFinished
from agentfly.core.json_values import canonical_json
from agentfly.core.messages import Image, Message, images_of, text_of
from agentfly.core.trajectory import ToolRecord, Trajectory, Turn
from agentfly.rollouts.token_recorder import NO_TOKENS
from agentfly.rollouts.turn_generator import AssistantTurn, TurnGenerator


class TrajectoryRecorder:
    """Records the turns of one rollout.

    Args:
        trajectory: receives the turns.
        events: receives an event for each generation.
    """

    def __init__(self, trajectory: Trajectory, events: EventStream) -> None:
        self.trajectory = trajectory
        self.events = events
        self._generators: list[TurnGenerator] = []

    def add_generator(self, generator: TurnGenerator) -> None:
        """Add the turn generator of a conversation that begins."""
        self._generators.append(generator)

    def record_turn(
        self,
        generated: AssistantTurn,
        *,
        kind: Literal["act", "memory"],
        agent: str,
        conversation: str,
        other_model: str,
        anchor: str,
        parent_turns: tuple[int, ...],
    ) -> int:
        """Record a turn. Return its index."""
        trajectory, span = self.trajectory, generated.token_span or NO_TOKENS
        turn = Turn(
            index=len(trajectory.turns),
            sequence=span.sequence,
            start=span.start,
            stop=span.stop,
            text=generated.text,
            ended_by_model=generated.ended_by_model,
            generation_seconds=generated.seconds,
            reasoning=generated.reasoning,
            content=None if generated.content == generated.text else generated.content,
            kind=kind,
            agent=agent,
            conversation=conversation,
            other_model=other_model,
            anchor=anchor,
            parent_turns=parent_turns,
            prompt_tokens=generated.prompt_tokens,
            sampled_tokens=generated.sampled_tokens,
        )
        trajectory.turns.append(turn)
        trajectory.seconds["generation"] += generated.seconds
        self.events.emit(
            GenerationFinished(
                rollout_id=trajectory.rollout_id,
                turn=turn.index,
                prompt_tokens=generated.prompt_tokens or 0,
                sampled_tokens=generated.sampled_tokens or 0,
                seconds=generated.seconds,
            )
        )
        return turn.index

    def record_results(self, index: int, results: Sequence[ToolRecord]) -> None:
        """Record the results of a turn's calls."""
        turns = self.trajectory.turns
        turns[index] = replace(turns[index], tool_results=tuple(results))

    def finish(self) -> None:
        """Check all token invariants and freeze the sequences, after all conversations have ended."""
        for generator in self._generators:
            generator.finish()


def anchor_hash(state: Any) -> str:
    """Return the hash of a state. It does not depend on the process or on the order of keys.

    Numbers count by value (``1`` equals ``1.0``), and tuples count as lists.
    """
    return _hash(canonical_json(state))


class AnchorState:
    """The state in which the next turn of one conversation is taken, and its anchor.

    It consists of the last state that a tool reported (`agentfly.agents.tool_result.ToolResult.state`) and the
    observations since then. If no tool reported a state, it is the last turn's observations. Before the first turn, it
    is the conversation's opening.

    Args:
        opening: the messages before the first turn. System messages are left out.
    """

    def __init__(self, opening: Sequence[Message]) -> None:
        asked = [message for message in opening if message["role"] != "system"]
        self._states: list[Any] = []
        self._seen: list[Any] = [  # texts only
            [one["role"], text_of(one["content"]), _names(images_of(one["content"]))] for one in asked
        ]
        self._anchor: str | None = None

    @property
    def anchor(self) -> str:
        """The anchor of the next turn."""
        if self._anchor is None:
            self._anchor = _hash(self.text)
        return self._anchor

    @property
    def text(self) -> str:
        """The state as JSON, with images by their hashes. The anchor is the hash of this text."""
        return canonical_json([self._states, self._seen])

    def update(self, results: Sequence[ToolRecord]) -> None:
        """Update the state with the results of a turn's calls."""
        states = [result.state for result in results if result.state is not None]
        if states:
            self._states, self._seen = states, []
        else:
            self._seen = [[result.observation, _names(result.images)] for result in results]
        self._anchor = None


def states_of(trajectory: Trajectory) -> list[str]:
    """Return for each turn the text of the state in which it was taken; its hash is the turn's anchor.

    The states are derived from the trajectory. A turn without an anchor has an empty text.
    """
    anchor_states: dict[str, AnchorState] = {}
    states = []
    for turn in trajectory.turns:
        if turn.conversation not in anchor_states:
            anchor_states[turn.conversation] = AnchorState(_opening(trajectory, turn))
        anchor_state = anchor_states[turn.conversation]
        states.append(anchor_state.text if turn.anchor else "")
        if turn.tool_results:
            anchor_state.update(turn.tool_results)
    return states


def _opening(trajectory: Trajectory, first: Turn) -> Sequence[Message]:
    if not first.conversation:
        return trajectory.task.messages
    messages = trajectory.subagents.get(first.conversation, [])
    return list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))


def _names(images: Iterable[Image]) -> list[str]:
    return [_hash(image.url) for image in images]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).hexdigest()
