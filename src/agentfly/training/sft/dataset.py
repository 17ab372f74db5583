"""SFTDataset: training rows of successful trajectories, from the sampled ids or rendered for the model to train."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfly.agents.agent import Agent
from agentfly.core.errors import ConfigError
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import FinishReason, Trajectory, load_trajectories
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.trajectory_rendering import CannotRender, TrajectoryRenderer
from agentfly.training.rows import Row, rows_of
from agentfly.training.sft.config import SFTConfig

Data = Iterable[Trajectory] | Sequence[Path | str] | Path | str
"""Trajectories, or where they are: directories of runs, and files of trajectories."""


@dataclass(frozen=True)
class SFTDataset:
    """The data of a supervised warm start.

    Attributes:
        rows: the training rows.
        held_out: rows of other tasks, for evaluation only.
        sampled, rendered: numbers of trajectories with sampled ids, and of rendered trajectories.
        excluded: number of trajectories without a row, by cause: ``infrastructure``, ``cancelled``, ``unscored``,
            ``low_reward``, ``beyond_max_per_task``, ``repeated`` (all their rows are there already), ``no_tokens``
            (under ``tokens=sampled``: no ids of this model), ``no_turns``, ``images``, ``too_long``,
            ``other_call_format``.
    """

    rows: tuple[Row, ...]
    held_out: tuple[Row, ...]
    sampled: int
    rendered: int
    excluded: Mapping[str, int]

    @property
    def fingerprint(self) -> str:
        """A hash of all rows."""
        digest = hashlib.sha256()
        for part in (self.rows, self.held_out):
            for row in part:
                digest.update(repr((list(row.ids), list(row.loss_mask))).encode())
            digest.update(b"|")
        return digest.hexdigest()[:16]


def load_data(data: Data) -> list[Trajectory]:
    """Return the given trajectories, or load them from the given paths.

    Raises:
        ConfigError: a path does not exist or contains no trajectories.
    """
    if isinstance(data, (str, Path)):
        data = [data]
    return [trajectory for one in data for trajectory in ([one] if isinstance(one, Trajectory) else _read(Path(one)))]


def build_dataset(
    trajectories: Iterable[Trajectory], agent: Agent, tokenizer: Tokenizer, config: SFTConfig, *, max_tokens: int
) -> SFTDataset:
    """Select successful trajectories and make rows with the same loss masks as in reinforcement learning.

    Args:
        trajectories: all trajectories.
        agent: the agent with the model to train; renders conversations without ids of that model.
        tokenizer: the model's tokenizer.
        config: the settings.
        max_tokens: maximum number of tokens of a row.

    Raises:
        ConfigError: no row is left; the message has the causes.
    """
    excluded: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    rows: dict[str, list[Row]] = {}
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    reader = _RowReader(agent, tokenizer, config, max_tokens)
    for trajectory in _select_trajectories(trajectories, config, excluded):
        try:
            kind, made = reader.read(trajectory)
        except CannotRender as refusal:
            excluded[refusal.cause] += 1
            continue
        kept = []
        for row in made:
            content = (tuple(row.ids), tuple(row.loss_mask))
            if not config.distinct or content not in seen:
                seen.add(content)
                kept.append(row)
        if not kept:
            excluded["repeated"] += 1
            continue
        counts[kind] += 1
        rows.setdefault(trajectory.task.id, []).extend(kept)
    if not rows:
        raise ConfigError(_empty_message(excluded, config))
    held_out = _held_out(rows, config)
    return SFTDataset(
        rows=tuple(row for task, each in rows.items() if task not in held_out for row in each),
        held_out=tuple(row for task, each in rows.items() if task in held_out for row in each),
        sampled=counts["sampled"],
        rendered=counts["rendered"],
        excluded=dict(excluded),
    )


class _RowReader:
    """Makes the rows of single trajectories. The renderer is created when the first trajectory needs it."""

    def __init__(self, agent: Agent, tokenizer: Tokenizer, config: SFTConfig, max_tokens: int) -> None:
        self._agent = agent
        self._tokenizer = tokenizer
        self._config = config
        self._max_tokens = max_tokens
        self._renderer: TrajectoryRenderer | None = None

    def read(self, trajectory: Trajectory) -> tuple[str, list[Row]]:
        """Return the source of the ids, ``sampled`` or ``rendered``, and the rows.

        Raises:
            CannotRender: the trajectory gives no rows.
        """
        requested = self._config.tokens
        if requested != "rendered" and _matches_tokenizer(trajectory, self._tokenizer):
            rows = list(rows_of(trajectory))
            if max(map(len, rows)) > self._max_tokens:
                raise CannotRender("too_long", "A row is longer than the model's context.")
            if any(row.images for row in rows):
                raise CannotRender("images", "A row has images.")
            return "sampled", rows
        if requested == "sampled":
            raise CannotRender("no_tokens", "The trajectory has no ids of this model.")
        if self._renderer is None:
            self._renderer = TrajectoryRenderer(
                self._agent, self._tokenizer, strategy=self._config.strategy, max_tokens=self._max_tokens
            )
        return "rendered", list(rows_of(self._renderer.render(trajectory)))


def _read(source: Path) -> Iterator[Trajectory]:
    files = [source] if source.is_file() else RunDirectory(source).saved_trajectories() if source.is_dir() else []
    if not files:
        what = "has no trajectories" if source.is_dir() else "does not exist"
        raise ConfigError(
            f"{source} {what}. Name the directory of a run, or a file of trajectories such as "
            "runs/mine/trajectories/rollout-000000.jsonl."
        )
    for file in files:
        yield from load_trajectories(file)


def _select_trajectories(
    trajectories: Iterable[Trajectory], config: SFTConfig, excluded: Counter[str]
) -> list[Trajectory]:
    by_task: dict[str, list[tuple[float, Trajectory]]] = {}
    for trajectory in trajectories:
        reward = trajectory.reward
        if trajectory.infrastructure_failed:
            excluded["infrastructure"] += 1
        elif trajectory.finish_reason is FinishReason.CANCELLED:
            excluded["cancelled"] += 1
        elif reward is None or not math.isfinite(reward):
            excluded["unscored"] += 1
        elif reward < config.min_reward:
            excluded["low_reward"] += 1
        else:
            by_task.setdefault(trajectory.task.id, []).append((reward, trajectory))
    chosen = []
    for each in by_task.values():
        best = sorted(each, key=lambda one: -one[0])[: config.max_per_task]
        excluded["beyond_max_per_task"] += len(each) - len(best)
        chosen += [trajectory for _, trajectory in best]
    excluded += Counter()  # drops causes with count 0
    return chosen


def _matches_tokenizer(trajectory: Trajectory, tokenizer: Tokenizer) -> bool:
    """Return whether the trajectory has ids for all its turns, and this tokenizer decodes them to the turns' texts."""
    own = [turn for turn in trajectory.turns if not turn.other_model]
    if not own or not trajectory.has_tokens or not any(one.sampled_count for one in trajectory.own_sequences):
        return False
    control = set(tokenizer.control_tokens.values())
    for turn in own:
        ids = trajectory.sequences[turn.sequence].ids[turn.start : turn.stop]
        visible = ids[:-1] if turn.ended_by_model and ids[-1] in control else ids
        if tokenizer.decode(visible) != turn.text or any(one not in tokenizer.vocabulary_ids for one in ids):
            return False
    return True


def _held_out(rows: Mapping[str, object], config: SFTConfig) -> set[str]:
    """Return the held-out tasks: a fraction of all tasks, independent of their order, and never all."""
    count = min(round(config.eval_fraction * len(rows)), len(rows) - 1)
    drawn = sorted(rows, key=lambda task: hashlib.sha256(f"{config.seed}/{task}".encode()).digest())
    return set(drawn[:count])


def _empty_message(excluded: Mapping[str, int], config: SFTConfig) -> str:
    causes = ", ".join(f"{number} {cause.replace('_', ' ')}" for cause, number in sorted(excluded.items()))
    return (
        f"There is nothing to learn from: of the trajectories, {causes or 'there is none'}. Those of a reward of at "
        f"least sft.min_reward={config.min_reward} are learned from; agentfly rollout makes some, with "
        "policy=oracle by the task's oracle."
    )
