"""Group: the attempts of a batch at one task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agentfly.errors import Boundary
from agentfly.task import Task
from agentfly.trajectory import Failure, FinishReason, Trajectory


@dataclass(eq=False, slots=True)
class Group:
    """The attempts at one task: those that wait, run, and have ended.

    Attributes:
        group_id: its name.
        task: the task.
        occurrence: how many groups of the batch were about a task of the same id before this one.
        attempts: how many attempts there are to be.
        begun: how many of them have begun.
        ended: what came of those that have ended, in the order of their ends.
        cancelled: whether it was cancelled: no further attempt begins, and those that run end.
        scored: how many attempts were scored as a group in an earlier run.
        taken_apart: whether a trajectory was handed out alone.
    """

    group_id: str
    task: Task
    occurrence: int
    attempts: int
    begun: int = 0
    ended: list[Trajectory] = field(default_factory=list)
    cancelled: bool = False
    scored: int = 0
    taken_apart: bool = False

    @property
    def waiting(self) -> int:
        """How many attempts have still to begin."""
        return 0 if self.cancelled else self.attempts - self.begun

    @property
    def whole(self) -> bool:
        """Whether no attempt waits or runs."""
        return not self.waiting and len(self.ended) == self.begun

    @property
    def complete(self) -> bool:
        """Whether every attempt has come to its own end, none cut off by a cancellation."""
        finishes = [trajectory.finish for trajectory in self.ended]
        return len(finishes) == self.attempts and FinishReason.CANCELLED not in finishes

    @property
    def in_order(self) -> list[Trajectory]:
        """What came of the attempts that have ended, in the order of the attempts."""
        return sorted(self.ended, key=lambda trajectory: trajectory.attempt)

    def begin(self) -> Trajectory:
        """The record of the next attempt, which begins."""
        attempt = self.begun
        self.begun += 1
        return Trajectory(f"{self.group_id}.{attempt}", self.group_id, self.task, attempt)

    def cancel_ended(self) -> int:
        """The attempts, which have ended, are not wanted any more; how many were sound until then.

        They become copies, so that scoring which takes no notice writes into nothing that is still looked at.
        """
        sound = [trajectory for trajectory in self.ended if not trajectory.infrastructure_failed]
        self.ended = [
            replace(one, finish=FinishReason.CANCELLED, reward=None) if not one.infrastructure_failed else replace(one)
            for one in self.ended
        ]
        return len(sound)

    def leave_unscored(self, error: BaseException) -> None:
        """The attempts could not be scored together, for ``error``."""
        for trajectory in self.ended:
            trajectory.reward = None
            trajectory.reward_failure = trajectory.reward_failure or Failure.of(error, Boundary.REWARD)
