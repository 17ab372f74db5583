"""Scribe: writes what happens in the conversations of a rollout into its trajectory, and emits the events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from agentfly.events import EventStream, GenerationFinished
from agentfly.rollouts.speaker import Speaker, Utterance
from agentfly.rollouts.tape import NO_PLACE
from agentfly.trajectory import ToolRecord, Trajectory, Turn


class Scribe:
    """Keeps the record of one rollout.

    Args:
        trajectory: the record.
        events: where events go.
    """

    def __init__(self, trajectory: Trajectory, events: EventStream) -> None:
        self.trajectory = trajectory
        self.events = events
        self._speakers: list[Speaker] = []

    def listen(self, speaker: Speaker) -> None:
        """A conversation has begun."""
        self._speakers.append(speaker)

    def turn(
        self,
        said: Utterance,
        *,
        kind: Literal["act", "memory"],
        agent: str,
        conversation: str,
        policy: str,
        anchor: str,
        follows: tuple[int, ...],
    ) -> int:
        """Write a turn down. Its number is returned."""
        trajectory, place = self.trajectory, said.place or NO_PLACE
        turn = Turn(
            index=len(trajectory.turns),
            sequence=place.sequence,
            start=place.start,
            stop=place.stop,
            text=said.text,
            stopped=said.stopped,
            generation_seconds=said.seconds,
            reasoning=said.reasoning,
            content=None if said.content == said.text else said.content,
            kind=kind,
            agent=agent,
            conversation=conversation,
            policy=policy,
            anchor=anchor,
            follows=follows,
            prompt_tokens=said.prompt_tokens,
            sampled_tokens=said.sampled_tokens,
        )
        trajectory.turns.append(turn)
        trajectory.seconds["generation"] += said.seconds
        self.events.emit(
            GenerationFinished(
                rollout_id=trajectory.rollout_id,
                turn=turn.index,
                prompt_tokens=said.prompt_tokens or 0,
                sampled_tokens=said.sampled_tokens or 0,
                seconds=said.seconds,
            )
        )
        return turn.index

    def answered(self, index: int, results: Sequence[ToolRecord]) -> None:
        """Write down what came of a turn's calls."""
        turns = self.trajectory.turns
        turns[index] = replace(turns[index], results=tuple(results))

    def finish(self) -> None:
        """All conversations have ended: check every invariant of the tokens, and freeze the sequences."""
        for speaker in self._speakers:
            speaker.finish()
