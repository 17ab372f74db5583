"""``agentfly rescore``: score stored trajectories with another reward, or a corrected one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core import signals
from agentfly.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from agentfly.agents.group_reward import AnyReward
    from agentfly.core.trajectory import Trajectory
    from agentfly.evaluation.rescoring import ScoreChange


def rescore(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|FILE.jsonl", help="A run's directory, or a file of trajectories.")
    ],
    reward: Annotated[str, typer.Option(help="The reward: module:name or path/file.py:name.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the new files; by default the directory of the old ones."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of trajectories that are scored at a time.")] = 64,
) -> None:
    """Score stored trajectories again.

    The old files stay as they are. Resources leased by the rollouts no longer exist: a reward that needs one leaves the
    trajectory unscored. Shared resources, such as a judge, are available.
    """
    from rich.console import Console

    from agentfly.cli.experiment import require_reward_object
    from agentfly.core.references import load_reference
    from agentfly.core.trajectory import load_trajectories, save_trajectories
    from agentfly.evaluation.rescoring import ScoreChange

    chosen = require_reward_object(load_reference(reward, base=Path.cwd(), field="--reward"), reference=reward)
    name = reward.rpartition(":")[2]
    targets: list[Path] = []
    changes: dict[str, ScoreChange] = {}
    for path in trajectory_files(source):
        old = list(load_trajectories(path))
        new = signals.run_until_signal(_rescore(old, chosen, concurrency))
        _require_scores(new, reward)
        target = _target(path, name, out)
        save_trajectories(new, target)
        targets.append(target)
        changes[path.stem] = ScoreChange.between(old, new)
    console = Console()
    console.print(_table(changes, f"scored by {reward}"))
    for target in targets:
        console.print(f"trajectories: {target}", soft_wrap=True, highlight=False)


async def _rescore(trajectories: list[Trajectory], reward: AnyReward, concurrency: int) -> list[Trajectory]:
    from agentfly.evaluation.rescoring import rescore

    return await rescore(trajectories, reward, max_concurrent_scores=concurrency)


def trajectory_files(source: Path) -> list[Path]:
    """Return the trajectory files of a run, or the named file.

    Raises:
        ConfigError: there are none.
    """
    from agentfly.core.run_directory import RunDirectory

    if source.is_file():
        return [source]
    files = RunDirectory(source).saved_trajectories() if source.is_dir() else []
    if not files:
        what = "has no trajectories" if source.is_dir() else "does not exist"
        raise ConfigError(
            f"{source} {what}. Name the directory of a run, or a file of trajectories such as "
            "runs/mine/trajectories/train-000001.jsonl."
        )
    return files


def _target(path: Path, name: str, out: Path | None) -> Path:
    """Return the path of a new file, named after the old one and the reward."""
    directory = path.parent if out is None else out
    directory.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        target = directory / f"{path.stem}.{name}{'' if number == 1 else f'-{number}'}.jsonl"
        if not target.exists():
            break
    return target


def _require_scores(trajectories: Iterable[Trajectory], reward: str) -> None:
    """Raise if the reward failed for all trajectories, so that nothing is written.

    Raises:
        UsageError: the reward failed for all; the message has one of the failures.
    """
    tried = [one for one in trajectories if one.reward is not None or one.reward_failure is not None]
    failures = [one.reward_failure for one in tried if one.reward_failure is not None]
    if tried and len(failures) == len(tried):
        location = f" (raised at {failures[0].location})" if failures[0].location else ""
        raise UsageError(
            f"{reward} gave none of {len(tried)} trajectories a score, so nothing was written. For instance: "
            f"{failures[0].message}{location}"
        )


def _table(changes: Mapping[str, ScoreChange], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("trajectories of")
    for heading in ("number", "changed", "mean before", "mean now", "unscored"):
        table.add_column(heading, justify="right")
    for name, change in changes.items():
        table.add_row(
            name,
            str(change.trajectories),
            str(change.changed),
            _mean(change.old_mean, change.old_scored),
            _mean(change.new_mean, change.new_scored),
            "\n".join(f"{count} {cause}" for cause, count in sorted(change.unscored.items())) or "0",
        )
    return table


def _mean(mean: float | None, scored: int) -> str:
    return "none scored" if mean is None else f"{mean:.4g} over {scored} scored"
