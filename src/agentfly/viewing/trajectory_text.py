"""A trajectory as text: the prompt, each turn with its tool calls and observations, and the reward."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.panel import Panel
from rich.text import Text

from agentfly.core.messages import Message, text_with_image_labels
from agentfly.core.numbers import require_whole
from agentfly.core.trajectory import Failure, ToolRecord, Trajectory, Turn, require_trajectory
from agentfly.rollouts.agent_loop import INVALID_CALL_KINDS
from agentfly.viewing.formatting import escape_control_characters, pluralize

_LABEL = "bold cyan"
_QUIET = "dim"


def trajectory_text(trajectory: Trajectory, *, max_lines: int = 12) -> Text:
    """Return one trajectory as styled text; ``.plain`` is the same without style.

    Args:
        trajectory: the trajectory.
        max_lines: the most lines of a message, a turn's text or an observation; longer ones lose their middle.

    Raises:
        UsageError: the value is not a trajectory, for instance a run's result, which holds several.
        ConfigError: ``max_lines`` is not a whole number of at least 1.
    """
    require_trajectory(trajectory, "trajectory_text")
    require_whole("trajectory_text", max_lines=max_lines)
    text = Text()
    for message in _prompt(trajectory):
        text.append(f"{message['role']}\n", _LABEL)
        _append_block(text, text_with_image_labels(message["content"]), max_lines=max_lines, style=_QUIET)
    shown = _append_conversation(text, trajectory.turns, "", max_lines, indent=0)
    for turn in trajectory.turns:  # of subagents, if the rollout ended before their call was answered
        if turn.index not in shown:
            _append_turn(text, turn, max_lines, indent=2)
    _append_end(text, trajectory)
    text.rstrip()
    return text


def trajectory_panel(trajectory: Trajectory, *, title: str | None = None, max_lines: int = 12) -> Panel:
    """Return one trajectory in a frame, titled with its rollout id unless a title is given."""
    return Panel(
        trajectory_text(trajectory, max_lines=max_lines),
        title=Text(title or f"rollout {trajectory.rollout_id}"),
        title_align="left",
        border_style="green" if (trajectory.reward or 0.0) > 0 else "yellow",
    )


def _prompt(trajectory: Trajectory) -> list[Message]:
    """Return the messages before the first turn: the rendered ones if they were kept, else the task's."""
    messages = trajectory.messages or trajectory.task.messages
    answers = sum(turn.kind == "act" and not turn.conversation for turn in trajectory.turns)
    heads = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if answers and len(heads) >= answers:
        return messages[: heads[len(heads) - answers]]
    return messages


def _append_conversation(text: Text, turns: Sequence[Turn], name: str, max_lines: int, *, indent: int) -> set[int]:
    """Append the turns of one conversation, and the turns of subagents below the calls that they answer.

    Returns the numbers of all appended turns.
    """
    shown: set[int] = set()
    before: Turn | None = None
    for turn in turns:
        if turn.conversation != name:
            continue
        begins = before is not None and turn.sequence != before.sequence
        note = f", begins sequence {turn.sequence + 1}" * begins + _branch_note(turns, turn, before)
        _append_turn(text, turn, max_lines, indent=indent, note=note)
        shown.add(turn.index)
        for result in turn.tool_results:
            _append_call(text, result, indent + 2)
            answered = "/".join(filter(None, (name, result.call.id)))
            shown |= _append_conversation(text, turns, answered, max_lines, indent=indent + 4)
            _append_observation(text, result, max_lines, indent + 4)
        before = turn
    return shown


def _branch_note(turns: Sequence[Turn], turn: Turn, before: Turn | None) -> str:
    """Return a note if a turn is a branch: it continues another turn than the one shown before it."""
    if before is None or not turn.parent_turns or before.index in turn.parent_turns:
        return ""
    if any(turns[number].conversation != turn.conversation for number in turn.parent_turns):
        return ""  # subagents that have answered it
    return f", continues turn {' and '.join(str(number + 1) for number in turn.parent_turns)}"


def _append_turn(text: Text, turn: Turn, max_lines: int, *, indent: int, note: str = "") -> None:
    agent = f" of {escape_control_characters(turn.agent)}" if turn.agent else ""
    what = ", to be remembered" if turn.kind == "memory" else ""
    text.append(f"{' ' * indent}turn {turn.index + 1}{agent}{what}", _LABEL)
    limit = "" if turn.ended_by_model else ", cut by a limit"
    reward = "" if turn.reward is None else f", reward {turn.reward:g}"
    tokens = f"{turn.stop - turn.start} tokens" if turn.sequence >= 0 else "unknown tokens"
    by = f", by {escape_control_characters(turn.other_model)}" if turn.other_model else ""
    text.append(f"  {tokens} in {turn.generation_seconds:.2f} s{by}{limit}{note}{reward}\n", _QUIET)
    if turn.reasoning and turn.reasoning not in turn.text:
        _append_block(text, turn.reasoning, max_lines=max_lines, indent=indent + 2, style=f"{_QUIET} italic")
    _append_block(text, turn.text, max_lines=max_lines, indent=indent + 2)


def _append_call(text: Text, result: ToolRecord, indent: int) -> None:
    call = result.call
    shown = call.name or "a call without a name"
    if call.arguments is not None:
        arguments = ", ".join(
            f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items()
        )
        shown = f"{shown}({arguments})"
    if result.failure is not None and result.failure.kind in INVALID_CALL_KINDS:
        shown += " (not executed)"  # the observation has the reason
    text.append(f"{' ' * indent}→ ", "bold")
    text.append(escape_control_characters(shown), "red" if result.failure else "bold")
    reward = "" if result.reward is None else f", reward {result.reward:g}"
    done = ", done" if result.done else ""
    text.append(f"  {result.seconds:.2f} s{reward}{done}\n", _QUIET)


def _append_observation(text: Text, result: ToolRecord, max_lines: int, indent: int) -> None:
    style = "red" if result.failure else "green"
    _append_block(text, result.observation, max_lines=max_lines, indent=indent, style=style)
    for image in result.images:
        text.append(f"{' ' * indent}{escape_control_characters(image.label)}\n", style)


def _append_end(text: Text, trajectory: Trajectory) -> None:
    reward = "unscored" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    finish = trajectory.finish_reason or "not finished"
    text.append(f"{reward}", "bold")
    turns = len(trajectory.turns)
    text.append(f"  {finish} after {pluralize(turns, 'turn')}", _QUIET)
    total = trajectory.seconds.get("total")
    text.append(f", {total:.2f} s\n" if total is not None else "\n", _QUIET)
    for name, value in trajectory.metrics.items():
        text.append(f"  {name} = {value:g}\n", _QUIET)
    if trajectory.untrainable_reason:
        _append_block(text, f"not to be trained on: {trajectory.untrainable_reason}", max_lines=8, style="yellow")
    for note in trajectory.notes:
        _append_block(text, note, max_lines=8, style=_QUIET)
    for what, failure in (("failed", trajectory.failure), ("not scored", trajectory.reward_failure)):
        if failure is not None:
            _append_failure(text, what, failure)


def _append_failure(text: Text, what: str, failure: Failure) -> None:
    text.append(f"{what}: {failure.kind} ({failure.boundary})\n", "bold red")
    _append_block(text, failure.message, max_lines=8, style="red")


def _append_block(text: Text, content: str, *, max_lines: int, indent: int = 2, style: str = "") -> None:
    lines = escape_control_characters(content).splitlines() or ["(empty)"]
    if len(lines) > max_lines:
        head = (max_lines + 1) // 2
        tail = max_lines - head
        excluded = f"… {len(lines) - max_lines} lines …"
        lines = [*lines[:head], excluded, *(lines[-tail:] if tail else [])]
    for line in lines:
        text.append(" " * indent + line + "\n", style)
