"""Harvest: the groups that one step is trained on, and how it comes by them."""

from __future__ import annotations

from dataclasses import dataclass

from agentfly.rollouts.health import Health
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.feed import Attempted, Source
from agentfly.training.teaching import teaches
from agentfly.trajectory import Trajectory


@dataclass(frozen=True)
class Harvest:
    """The groups of one step.

    Attributes:
        kept: those that are trained on, in the order of the tasks.
        dropped: those that teach nothing, in the order of the tasks; none without dynamic sampling.
        refills: how often others were rolled out in their place.
    """

    kept: tuple[Attempted, ...]
    dropped: tuple[Attempted, ...] = ()
    refills: int = 0

    @property
    def groups(self) -> list[Attempted]:
        """All of them, in the order of the tasks."""
        return sorted((*self.kept, *self.dropped), key=lambda group: group.number)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rollouts of all groups, the greedy ones apart."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def trained(self) -> list[Trajectory]:
        """The rollouts of the groups that are trained on."""
        return [trajectory for group in self.kept for trajectory in group.trajectories]

    @property
    def greedy(self) -> list[Trajectory]:
        """The greedy rollouts."""
        return [group.greedy for group in self.groups if group.greedy is not None]

    @property
    def metrics(self) -> dict[str, float]:
        """How many groups it took, and how many of them were dropped."""
        return {
            "sampling/groups": float(len(self.kept) + len(self.dropped)),
            "sampling/dropped_groups": float(len(self.dropped)),
            "sampling/refills": float(self.refills),
        }


async def harvest(source: Source, cursor: int, config: TrainConfig, *, steps_left: int) -> Harvest:
    """Gather the groups of the step that begins at ``cursor``, oldest first.

    While they are gathered, the groups of the next ``max_staleness`` steps may run too: what begins under the weights
    of now is trained after at most so many updates, since every step takes its groups from the head of the order. With
    dynamic sampling, groups that teach nothing are made up for by the next groups of the order, so that the same groups
    come to the same steps, whatever ended first.

    Args:
        source: where the groups come from.
        cursor: number of the first.
        config: the run's settings.
        steps_left: how many steps come after this one.

    Raises:
        TooManyFailures: infrastructure spoiled too large a share of the rollouts.
    """
    ahead = config.tasks_per_step * min(config.max_staleness, steps_left)
    at_a_time = (config.tasks_per_step + ahead) * config.attempts
    if config.max_concurrent_rollouts is not None:
        at_a_time = min(at_a_time, config.max_concurrent_rollouts)
    health = Health(config.max_failure_share, lambda: at_a_time)
    refills_left = config.dynamic_sampling.max_refills if config.dynamic_sampling else 0
    kept: list[Attempted] = []
    dropped: list[Attempted] = []
    refills, wanted, asked = 0, config.tasks_per_step, 0
    source.dispatch(cursor + wanted + ahead)
    while wanted:
        lacking, asked = 0, asked + wanted
        for number in range(cursor, cursor + wanted):
            group = await source.take(number)
            _check(health, group, asked * config.attempts)
            if config.dynamic_sampling is None or teaches(group, config):
                kept.append(group)
                continue
            dropped.append(group)
            lacking += 1
            if refills_left:
                source.dispatch(cursor + wanted + lacking + ahead)
        cursor += wanted
        wanted = lacking if refills_left else 0
        if wanted:
            refills, refills_left = refills + 1, refills_left - 1
    if (error := health.verdict()) is not None:
        raise error
    return Harvest(tuple(kept), tuple(dropped), refills)


def _check(health: Health, group: Attempted, rollouts: int) -> None:
    for trajectory in group.trajectories:
        if (error := health.count(trajectory, rollouts=rollouts)) is not None:
            raise error
