"""Foresight: what the next tasks will need is prepared for while the ones before them run."""

from __future__ import annotations

import logging

from agentfly.rollouts.rollout import Surroundings
from agentfly.task import Task

logger = logging.getLogger(__name__)

AHEAD = 8
"""Tasks that are prepared for beyond the one whose rollout begins: enough to keep fetching, too few to fill a disk."""


class Foresight:
    """Has the engine prefetch what tools and reward have declared for tasks whose turn comes soon.

    Args:
        around: what all rollouts share.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    def expect(self, task: Task) -> None:
        """The rollouts of a task will begin soon."""
        try:
            specs = self._around.needs(task)
            self._around.engine.prefetch(spec for spec in specs if spec.preparation_key is not None or spec.warm)
        except Exception as error:  # also of a user's own spec
            logger.debug("Nothing is prefetched for task %s, whose rollouts will tell: %s", task.id, error)
