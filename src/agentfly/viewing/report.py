"""The final report of a training run, read from the run's own files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentfly.core.run_directory import RunDirectory, StepMetrics, TrajectoryKind
from agentfly.core.trajectory import Trajectory, load_trajectories
from agentfly.evaluation.scores import EvaluationScores
from agentfly.evaluation.statistics import CONFIDENCE_LEVEL, Estimate
from agentfly.viewing.diagnostics import TrainingDiagnostics
from agentfly.viewing.formatting import bar_chart, pluralize
from agentfly.viewing.run_state import REWARD, SUCCESS
from agentfly.viewing.trajectory_text import trajectory_panel


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The results of a training run.

    Attributes:
        steps: number of finished steps.
        rewards: mean reward of each step in which anything was scored, in order.
        averaged: number of steps that ``reward_start`` and ``reward_end`` are means over: a tenth of ``rewards``.
        reward_start, reward_end: mean over the first and the last of ``rewards``; None before the first step.
        success_before, success_after: share of the rollouts of held-out tasks that solve them, at the first and at the
            last evaluation, with their intervals where the trajectories are still there.
        lessons: why nothing was learned from steps, in sentences.
    """

    steps: int
    rewards: tuple[float, ...]
    averaged: int
    reward_start: float | None
    reward_end: float | None
    success_before: Estimate | None
    success_after: Estimate | None
    lessons: tuple[str, ...]

    @classmethod
    def of(cls, run: RunDirectory) -> RunSummary:
        """Summarise a run from its metrics."""
        rows = run.metrics()
        rewards = tuple(row.values[REWARD] for row in rows if REWARD in row.values)
        evaluations = [row for row in run.metrics("eval") if SUCCESS in row.values]
        diagnostics = TrainingDiagnostics()
        for row in rows:
            diagnostics.add(row.values)
        tenth = math.ceil(len(rewards) / 10)
        return cls(
            steps=len(rows),
            rewards=rewards,
            averaged=tenth,
            reward_start=sum(rewards[:tenth]) / tenth if tenth else None,
            reward_end=sum(rewards[-tenth:]) / tenth if tenth else None,
            success_before=_success(run, evaluations[0]) if evaluations else None,
            success_after=_success(run, evaluations[-1]) if len(evaluations) > 1 else None,
            lessons=tuple(diagnostics.messages()),
        )


def _success(run: RunDirectory, evaluation: StepMetrics) -> Estimate:
    """Return the share of an evaluation's rollouts that solve their task."""
    path = run.trajectories_file(evaluation.step, "eval")
    board = EvaluationScores.from_trajectories(load_trajectories(path)) if path.is_file() else EvaluationScores({})
    return board.success() or Estimate(evaluation.values[SUCCESS], None, None, 0)


def training_report(run: RunDirectory, *, stopped_early: str = "") -> RenderableType:
    """Return reward and held-out success at start and end, the curve, a trajectory from each, and the files.

    Args:
        run: the run's directory.
        stopped_early: why the run ended before its last step, in words; empty if it did not.
    """
    summary = RunSummary.of(run)
    parts: list[RenderableType] = [_figures(summary)]
    if stopped_early:
        parts.append(Text(f"ended early: {stopped_early}"))
    parts += [Text(sentence, style="yellow") for sentence in summary.lessons]
    if summary.rewards:
        parts += [Text("\nmean reward of each step"), Text(bar_chart(summary.rewards), style="green", no_wrap=True)]
    before, after = before_and_after(run)
    if before is not None:
        parts.append(trajectory_panel(before, title="before training"))
    if after is not None:
        parts.append(trajectory_panel(after, title="after training"))
    parts.append(_files(run))
    return Group(*parts)


def metrics_table(metrics: dict[str, float], title: str) -> RenderableType:
    """Return a table of metrics by name, without counts that are 0."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in metrics.items():
        if value or "/mean" in name:
            table.add_row(Text(name), f"{value:.4g}")
    return Group(Text(title, style="bold"), table)


def before_and_after(run: RunDirectory) -> tuple[Trajectory | None, Trajectory | None]:
    """Return a trajectory from before training and one from after it, of the same task if possible.

    Held-out tasks come first, then the tasks trained on. The one after training is among the best. The one before
    training has a lower reward if possible, and of those the reward nearest to the mean before training.
    """
    kinds: tuple[TrajectoryKind, ...] = ("eval", "train")
    for kind in kinds:
        files = run.trajectory_files(kind)
        if len(files) < 2:
            continue
        first, last = (
            [trajectory for trajectory in load_trajectories(path) if trajectory.reward is not None]
            for path in (files[0][1], files[-1][1])
        )
        if first and last:
            return _pair(first, last)
    return None, None


def _pair(first: list[Trajectory], last: list[Trajectory]) -> tuple[Trajectory, Trajectory]:
    mean = sum(_reward(old) for old in first) / len(first)

    def fitness(pair: tuple[Trajectory, Trajectory]) -> tuple[bool, float, float]:
        old, new = pair
        return _reward(new) > _reward(old), _reward(new), -abs(_reward(old) - mean)

    same_task = [(old, new) for new in last for old in first if old.task.id == new.task.id]
    return max(same_task or [(old, new) for new in last for old in first], key=fitness)


def _reward(trajectory: Trajectory) -> float:
    return trajectory.reward if trajectory.reward is not None else 0.0


def _figures(summary: RunSummary) -> RenderableType:
    table = Table()
    table.add_column("")
    table.add_column("start", justify="right")
    table.add_column("end", justify="right")
    over = f"{summary.averaged} steps" if summary.averaged > 1 else "step"
    table.add_row(f"mean reward, first and last {over}", _number(summary.reward_start), _number(summary.reward_end))
    estimates = summary.success_before, summary.success_after
    table.add_row("held-out rollouts solved", *map(_share, estimates))
    if any(one is not None and one.low is not None for one in estimates):
        table.add_row(f"  {CONFIDENCE_LEVEL:.0%} interval over the tasks", *map(_interval, estimates))
    return Group(Text(pluralize(summary.steps, "training step"), style="bold"), table)


def _files(run: RunDirectory) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for what, path in (
        ("configuration", run.config_file),
        ("metrics", run.metrics_file),
        ("events", run.events_file),
        ("trajectories", run.trajectories),
        ("checkpoints", run.checkpoints),
        ("charts", run.tensorboard),
    ):
        if path.exists():
            table.add_row(Text(what, style="dim"), Text(str(path)))
    return Group(Text("\nthe run's files", style="bold"), table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.mean:.0%}"


def _interval(value: Estimate | None) -> str:
    return "-" if value is None or value.low is None or value.high is None else f"{value.low:.0%} … {value.high:.0%}"
