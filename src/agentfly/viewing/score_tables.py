"""Tables of scores: one evaluation by task, and two evaluations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentfly.core.messages import text_of
from agentfly.evaluation.scores import EvaluationComparison, EvaluationScores, PairedDifference, TaskScores
from agentfly.evaluation.statistics import CONFIDENCE_LEVEL, Estimate
from agentfly.viewing.formatting import pluralize

SHOWN_TASKS = 20
"""Number of tasks that a table shows unless all are requested."""

_PROMPT_CHARS = 60


def scores_table(board: EvaluationScores, ks: Sequence[int], *, all_tasks: bool = False) -> RenderableType:
    """Return the estimates of an evaluation, the scores of each task, and the excluded trajectories.

    Args:
        board: the scores.
        ks: the values of k for pass@k, one of k attempts, and pass^k, all of them.
        all_tasks: show every task, not only those solved least often.
    """
    estimates = {"reward": board.reward(), "success": board.success()}
    estimates |= {f"pass@{k}": board.pass_at(k) for k in ks}
    estimates |= {f"pass^{k}": board.pass_hat(k) for k in ks if k > 1}
    table = Table()
    for heading in ("over the tasks", "mean", f"{CONFIDENCE_LEVEL:.0%} interval", "tasks"):
        table.add_column(heading, justify="left" if heading == "over the tasks" else "right")
    for name, estimate in estimates.items():
        table.add_row(name, *_cells(estimate))
    return Group(table, _per_task(board, all_tasks), *_excluded(board.excluded))


def comparison_table(
    comparison: EvaluationComparison, names: tuple[str, str] = ("first", "second"), *, all_tasks: bool = False
) -> RenderableType:
    """Return two evaluations side by side: means, difference with interval, wins, and the tasks that differ most."""
    table = Table()
    for heading in (
        "over the tasks",
        *names,
        "difference",
        f"{CONFIDENCE_LEVEL:.0%} interval",
        "wins",
        "ties",
        "losses",
    ):
        table.add_column(heading, justify="left" if heading == "over the tasks" else "right")
    for name, one in (("reward", comparison.reward), ("success", comparison.success)):
        table.add_row(name, *_compared(one))
    lines = [
        Text(f"{pluralize(len(comparison.pairs), 'task')} compared; wins are tasks in which {names[1]} did better"),
        *_excluded_note(comparison.unscored, "left out, without a score in one of them"),
        *_excluded_note(comparison.only_first, f"left out, in {names[0]} only"),
        *_excluded_note(comparison.only_second, f"left out, in {names[1]} only"),
    ]
    return Group(table, _per_pair(comparison, names, all_tasks), *lines)


def _cells(estimate: Estimate | None) -> tuple[str, str, str]:
    if estimate is None:
        return "none scored", "", "0"
    return f"{estimate.mean:.4g}", _interval(estimate), str(estimate.tasks)


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "no interval from one task" if estimate.tasks == 1 else "all tasks alike"
    return f"{estimate.low:.4g} … {estimate.high:.4g}"


def _compared(one: PairedDifference) -> list[str]:
    numbers = [f"{one.first:.4g}", f"{one.second:.4g}", f"{one.difference.mean:+.4g}", _interval(one.difference)]
    return [*numbers, str(one.wins), str(one.ties), str(one.losses)]


def _per_task(board: EvaluationScores, all_tasks: bool) -> RenderableType:
    rows = list(board.tasks.items())
    if not all_tasks and len(rows) > SHOWN_TASKS:
        rows = sorted(rows, key=lambda row: (_solved(row[1]), row[0]))[:SHOWN_TASKS]
    title = "each task" if len(rows) == len(board.tasks) else f"the {len(rows)} of {len(board.tasks)} solved least"
    table = Table(title=title, title_justify="left")
    for heading in ("task", "asked", "solved", "mean reward", "left out"):
        table.add_column(heading, justify="left" if heading in ("task", "asked") else "right")
    for name, scores in rows:
        table.add_row(
            Text(name),
            Text(_asked(scores)),
            f"{sum(scores.successes)} of {len(scores.successes)}",
            _mean(scores.rewards),
            ", ".join(f"{count} {cause}" for cause, count in sorted(scores.excluded.items())),
        )
    return table


def _per_pair(comparison: EvaluationComparison, names: tuple[str, str], all_tasks: bool) -> RenderableType:
    rows = sorted(comparison.pairs, key=lambda pair: -abs(_average(pair.second.rewards) - _average(pair.first.rewards)))
    shown = rows if all_tasks else rows[:SHOWN_TASKS]
    title = "each task" if len(shown) == len(rows) else f"the {len(shown)} of {len(rows)} that differ most"
    table = Table(title=f"mean reward of {title}", title_justify="left")
    for heading in ("task", "asked", *names, "difference"):
        table.add_column(heading, justify="left" if heading in ("task", "asked") else "right")
    for pair in shown:
        first, second = _average(pair.first.rewards), _average(pair.second.rewards)
        table.add_row(
            Text(pair.task_id), Text(_asked(pair.first)), f"{first:.4g}", f"{second:.4g}", f"{second - first:+.4g}"
        )
    return table


def _excluded(excluded: Mapping[str, int]) -> list[RenderableType]:
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(excluded.items()))
    return [Text(f"in none of these numbers: {causes}", style="bold yellow")] if excluded else []


def _excluded_note(count: int, what: str) -> list[RenderableType]:
    return [Text(f"{pluralize(count, 'task')} {what}", style="bold yellow")] if count else []


def _asked(scores: TaskScores) -> str:
    messages = scores.task.messages
    prompt = " ".join(text_of(messages[-1]["content"]).split()) if messages else ""
    return prompt if len(prompt) <= _PROMPT_CHARS else f"{prompt[: _PROMPT_CHARS - 1]}…"


def _solved(scores: TaskScores) -> float:
    return _average(scores.successes)


def _mean(values: Sequence[float]) -> str:
    return f"{_average(values):.4g}" if values else "none scored"


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
