"""Foresight: what the next tasks will need is prepared for while the ones before them run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentfly.rollouts.rollout import Surroundings
from agentfly.task import Task

logger = logging.getLogger(__name__)

AHEAD = 8
"""Tasks that are prepared for beyond the one whose rollout begins: enough to keep fetching, too few to fill a disk."""


class Foresight:
    """Has the engine prefetch what tools and reward have declared for the next tasks, each once.

    Args:
        around: what all rollouts share.
        tasks: the tasks, in the order in which their rollouts begin.
    """

    def __init__(self, around: Surroundings, tasks: Sequence[Task]) -> None:
        self._around = around
        self._tasks = tasks
        self._seen = 0

    def begins(self, index: int) -> None:
        """A rollout of the task of that number begins."""
        upto = min(index + 1 + AHEAD, len(self._tasks))
        for task in self._tasks[self._seen : upto]:
            try:
                specs = self._around.needs(task)
                self._around.engine.prefetch(spec for spec in specs if spec.preparation_key is not None or spec.warm)
            except Exception as error:  # also of a user's own spec
                logger.debug("Nothing is prefetched for task %s, whose rollouts will tell: %s", task.id, error)
        self._seen = max(self._seen, upto)
