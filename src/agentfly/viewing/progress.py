"""ConsoleProgress: what a run is doing, live on a terminal, and line by line elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentfly.core.events import (
    CheckpointSaved,
    EvaluationFinished,
    Event,
    Progress,
    RolloutsScheduled,
    StepFinished,
    TrainingFinished,
    TrainingStarted,
)
from agentfly.viewing.diagnostics import TrainingDiagnostics
from agentfly.viewing.formatting import format_clock, pluralize, sparkline
from agentfly.viewing.run_state import REWARD, SUCCESS, TURNS, RunState

_MAX_SILENCE_S = 30.0
"""Seconds after which a line is printed even if no further tenth of the rollouts has finished."""


class ConsoleProgress:
    """A subscriber that shows a run: live on a terminal, else one line per step.

    Args:
        console: where to show it; standard error by default, so that standard output has only results.
        live: whether to draw live; None draws live if the console is a terminal.
    """

    def __init__(self, console: Console | None = None, *, live: bool | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live_wanted = self._console.is_terminal if live is None else live
        self._state = RunState()
        self._lock = Lock()
        self._live: Live | None = None
        self._last_message = ""
        self._tenth = 0
        self._last_line_at = 0.0

    def __enter__(self) -> Self:
        if self._live_wanted:
            self._live = Live(
                get_renderable=self._locked(self._render), console=self._console, refresh_per_second=4, transient=False
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._state.update(event)
        if self._live is None:
            line = self._line(event) or self._rollouts_line(event)
            if line:
                self._console.print(Text(line), soft_wrap=True)

    def _locked(self, draw: Callable[[], RenderableType]) -> Callable[[], RenderableType]:
        """Return ``draw`` under the lock: rich draws on its own thread while events arrive."""

        def drawn() -> RenderableType:
            with self._lock:
                return draw()

        return drawn

    # --- line by line -------------------------------------------------------------------------------------------------

    def _line(self, event: Event) -> str:
        state = self._state
        match event:
            case TrainingStarted() if event.start_step >= event.steps:
                return _ended(event.start_step, event.further)
            case TrainingStarted():
                start = f" from step {event.start_step}" if event.start_step else ""
                line = f"training {pluralize(event.steps, 'step')}{start} of {state.model}; files in {event.run_dir}"
                return "\n".join([line, *_dtype_note(event.dtype)])
            case StepFinished():
                left = state.seconds_left()
                parts = [f"step {event.step}/{state.steps}", *_figures(event.metrics)]
                if speed := state.tokens_per_second(event.time):  # a warm start samples no tokens
                    parts.append(f"{speed:.0f} tokens/s")
                if left:
                    parts.append(f"{format_clock(left)} left")
                return "\n".join(
                    [
                        "  ".join(parts),
                        *(f"  {sentence}" for sentence in _findings(event.metrics, state.first_scoring_error)),
                    ]
                )
            case EvaluationFinished():
                return "  ".join([f"held-out tasks after step {event.step}", *_figures(event.metrics)])
            case CheckpointSaved():
                return f"checkpoint {event.path}"
            case TrainingFinished() if event.reason:
                return _ended_early(event.step, event.reason)
            case Progress() if event.what != self._last_message:
                self._last_message = event.what
                return event.what
        return ""

    def _rollouts_line(self, event: Event) -> str:
        """Return the progress of the planned rollouts, at every tenth of them and at least every half minute."""
        state = self._state
        if not state.planned:
            return ""
        tenth = 10 * state.finished // state.planned
        if (
            tenth <= self._tenth
            and event.time < self._last_line_at + _MAX_SILENCE_S
            and not isinstance(event, RolloutsScheduled)
        ):
            return ""
        self._tenth, self._last_line_at = tenth, event.time
        return "  ".join(_rollouts(state, event.time))

    # --- live ---------------------------------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        state = self._state
        parts: list[RenderableType] = [Text(sentence) for sentence in _dtype_note(state.dtype)]
        if state.steps:
            parts.append(self._bar())
            parts.append(self._figures_table())
            if state.was_already_finished:
                parts.append(Text(_ended(state.step, state.further), style="yellow"))
            if state.stop_reason:
                parts.append(Text(_ended_early(state.step, state.stop_reason)))
            parts += [Text(sentence, style="yellow") for sentence in state.lessons.messages()]
        elif state.planned:
            parts.append(Text("  ".join([*_rollouts(state), self._now()])))
        elif state.running or state.finished:
            parts.append(Text(f"rollouts: {state.finished} finished, {self._now()}"))
        if state.activity is not None:
            parts.append(Text(_doing(state.activity), style="dim"))
        return Group(*parts)

    def _bar(self) -> RenderableType:
        state = self._state
        is_over = state.was_already_finished or bool(state.stop_reason)
        left = None if is_over else state.seconds_left()
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(f"step {state.step}/{state.steps}", style="bold"),
            ProgressBar(total=state.steps, completed=state.step, width=30),
            Text(f"{format_clock(left)} left" if left is not None else "" if is_over else "first step ..."),
        )
        return row

    def _figures_table(self) -> RenderableType:
        state = self._state
        table = Table.grid(padding=(0, 2))
        table.add_row("model", state.model, "")
        if state.rewards:
            table.add_row("reward", Text(f"{state.rewards[-1]:.2f}", style="bold green"), sparkline(state.rewards, 48))
        if SUCCESS in state.metrics:
            table.add_row("success", f"{state.metrics[SUCCESS]:.0%}", "")
        if state.evaluations:
            shown = [f"{metrics[SUCCESS]:.0%}" for _, metrics in state.evaluations if SUCCESS in metrics]
            first = f"from {shown[0]} before training" if len(shown) > 1 else ""
            table.add_row("held-out", *shown[-1:], first)
        turns = f"{state.metrics[TURNS]:.1f} turns each, " if TURNS in state.metrics else ""
        table.add_row("rollouts", str(state.finished), turns + self._now())
        return table

    def _now(self) -> str:
        state = self._state
        failed = f", {state.failed} failed" if state.failed else ""
        return (
            f"{state.running} running, {state.waiting} waiting for a resource{failed}, "
            f"{state.tokens_per_second():.0f} tokens/s"
        )


def _rollouts(state: RunState, now: float | None = None) -> list[str]:
    """Return the number of finished rollouts, their mean reward, failures and the time left."""
    parts = [f"{state.finished} of {pluralize(state.planned, 'rollout')} finished"]
    if state.scores:
        parts.append(f"reward {sum(state.scores) / len(state.scores):.3f}")
    if state.failed:
        parts.append(f"{state.failed} failed")
    if state.cancelled:
        parts.append(f"{state.cancelled} cancelled")
    left = state.rollout_seconds_left(now)
    if left and state.finished < state.planned:
        parts.append(f"{format_clock(left)} left")
    return parts


def _figures(metrics: dict[str, float]) -> list[str]:
    shown = []
    if REWARD in metrics:
        shown.append(f"reward {metrics[REWARD]:.3f}")
    if SUCCESS in metrics:
        shown.append(f"success {metrics[SUCCESS]:.0%}")
    if TURNS in metrics:
        shown.append(f"turns {metrics[TURNS]:.1f}")
    shown += [f"loss {metrics[name]:.4f}" for name in ("sft/loss", "sft/held_out_loss") if name in metrics]
    return shown


def _dtype_note(dtype: str) -> list[str]:
    """Return a note on the number format of the trained model, if it rounds."""
    if dtype in ("", "float32"):
        return []
    return [
        f"  {dtype} rounds: log-probs differ a little between sampling and training. mismatch/* in the metrics says by "
        "how much; dtype: float32 avoids it"
    ]


def _ended_early(step: int, reason: str) -> str:
    return f"ended early, after step {step}: {reason}"


def _ended(step: int, further: str) -> str:
    return f"already finished at step {step}; {further}" if further else f"already finished at step {step}"


def _findings(metrics: dict[str, float], scoring_error: str) -> list[str]:
    """Return the findings about one step."""
    diagnostics = TrainingDiagnostics()
    diagnostics.add(metrics, scoring_error)
    return diagnostics.messages()


def _doing(progress: Progress) -> str:
    if progress.done is None or not progress.total:
        return f"{progress.what} ..."
    return f"{progress.what}: {progress.done / progress.total:.0%}"
