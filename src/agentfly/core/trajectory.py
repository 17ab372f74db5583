"""Trajectory: the record of a rollout, and its JSON-lines form."""

from __future__ import annotations

import functools
import json
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from agentfly.core.errors import (
    AgentFlyError,
    Boundary,
    ConfigError,
    UsageError,
    describe_error,
    error_message,
    type_of,
)
from agentfly.core.files import append_lines, atomic_write, is_whole_line
from agentfly.core.json_values import Brief, own_copy, score_of, to_json_line
from agentfly.core.messages import Image, Message, ToolCall, message_from_json, message_to_json
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence

_CHAINED = re.compile(r"\n\n(?:The above exception was the direct cause|During handling of the above exception)")
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@functools.cache
def _not_users() -> tuple[str, ...]:
    """Path prefixes of code that is not the user's: AgentFly, the standard library and installed packages."""
    installed = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return ("<", *(f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], *installed)))


class FinishReason(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"  # the model ended a turn without a tool call
    DONE = "done"  # a tool said that the task is done
    MAX_TURNS = "max_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    LENGTH = "length"  # a limit on tokens, per turn or in all
    WALL_TIME = "wall_time"
    INVALID_CALLS = "invalid_calls"  # too many calls in a row that could not be executed
    CANCELLED = "cancelled"
    FAILED = "failed"  # see `Trajectory.failure`


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a rollout or its reward, typed by the boundary that it crossed.

    Attributes:
        boundary: the boundary.
        kind: name of the exception's type.
        message: the exception's message.
        by_policy: whether the policy could have caused it. If not, it is infrastructure: no reward, no loss.
        traceback: the formatted traceback.
    """

    boundary: Boundary
    kind: str
    message: str
    by_policy: bool
    traceback: str = ""

    @property
    def location(self) -> str:
        """The last line of the user's own code that led to the failure, as ``file:line in function``.

        Where there is none in the traceback it is the line that raised the first exception of the chain; empty if that
        is not known.
        """
        chain = [_FRAME.findall(part) for part in _CHAINED.split(self.traceback)]
        users = [frame for part in chain for frame in reversed(part) if not frame[0].startswith(_not_users())]
        frame = users[0] if users else next((part[-1] for part in chain if part), None)
        return "" if frame is None else "{}:{} in {}".format(*frame)

    @classmethod
    def of(cls, error: BaseException, boundary: Boundary = Boundary.USAGE, *, by_policy: bool = False) -> Failure:
        """Describe an exception; ``boundary`` and ``by_policy`` are for exceptions that are not AgentFly's own."""
        if isinstance(error, AgentFlyError):
            boundary, by_policy = error.boundary, error.by_policy
        return cls(
            boundary=boundary,
            kind=type(error).__name__,
            message=error_message(error) or type(error).__name__,
            by_policy=by_policy,
            traceback="".join(traceback.format_exception(error)).encode("utf-8", errors="replace").decode(),
        )


@dataclass(frozen=True, slots=True, repr=False)
class ToolRecord(Brief):
    """One tool call of a turn, and its result.

    Attributes:
        call: the call as the model made it.
        observation: the text shown to the model.
        reward: the reward that the tool gave for the call, if any.
        done: whether the tool reported that the task is done.
        state: the environment's state after the call, if the tool reported it; a JSON value.
        info: further data from the tool that the model does not see; JSON values.
        failure: set when the call failed; the observation then says so to the model.
        seconds: duration of the call, waiting for resources included.
        images: the images shown to the model with the observation.
    """

    call: ToolCall
    observation: str
    reward: float | None = None
    done: bool = False
    state: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Turn(Brief):
    """One generation and the tool results that answer it.

    Attributes:
        index: number of the turn, from 0.
        sequence: index of the turn's token sequence in `Trajectory.sequences`; -1 where the tokens are not known, for
            instance from a model behind an API.
        start, stop: the range of the turn's sampled tokens in that sequence.
        text: the sampled tokens as text, without the end-of-turn token.
        ended_by_model: whether the model ended the turn itself; False if a token limit ended it.
        tool_results: the tool calls and their results, in the order of the calls.
        generation_seconds: duration of the generation, waiting for the policy included.
        reasoning: the model's reasoning, where the format separates it.
        content: the visible text, where it differs from ``text``: without reasoning and other parts that the format
            separates. See `visible_text`.
        kind: ``act``, or ``memory`` for a generation that only writes a memory.
        agent: path of the subagent that took the turn, names joined by ``/``; empty for the main agent.
        conversation: the conversation of the turn: the ids of the tool calls that led to it, joined by ``/``; empty for
            the main agent's. Each call of a subagent begins a new one.
        other_model: the subagent's model, if it is not the main agent's; else empty. Such turns are never
            trained on.
        reward: the reward of the turn itself (step reward), if there is one.
        anchor: the state in which the turn was taken, as a hash of the environment's last result; the order of keys
            does not matter. Turns of one task with the same anchor acted in the same state.
        parent_turns: indices of the turns that led directly to this one: the previous turn of its conversation, or the
            last turns of the subagents that answered it. For a subagent's first turn, the turn that called it. Empty
            for the rollout's first turn, None where it is not known.
        prompt_tokens, sampled_tokens: numbers of tokens read and sampled, reasoning included, as reported by the policy
            or the endpoint; None where not reported.
    """

    index: int
    sequence: int
    start: int
    stop: int
    text: str
    ended_by_model: bool
    tool_results: tuple[ToolRecord, ...] = ()
    generation_seconds: float = 0.0
    reasoning: str | None = None
    content: str | None = None
    kind: Literal["act", "memory"] = "act"
    agent: str = ""
    conversation: str = ""
    other_model: str = ""
    reward: float | None = None
    anchor: str = ""
    parent_turns: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None

    @property
    def visible_text(self) -> str:
        """The visible text of the turn, without reasoning where the format separates it."""
        return self.text if self.content is None else self.content


@dataclass(repr=False)
class Trajectory:
    """The record of one rollout: one attempt of an agent at a task.

    Attributes:
        rollout_id: unique name of the rollout.
        group_id: shared by all attempts at one task in one batch; the unit of a group baseline.
        attempt: number of the attempt in its group, from 0.
        task: the task.
        messages: the conversation as text, for people, tools and rewards. Training reads `sequences` only.
        turns: the turns in the order in which they ended, those of subagents included.
        sequences: the token sequences, in order. Under the strategy ``chain`` a conversation has one, and one more each
            time its past is folded or rewritten; under ``step`` one a turn.
        subagents: the conversations of subagents, by `Turn.conversation`.
        finish_reason: why the rollout ended; None while it runs.
        failure: set when the rollout failed.
        reward: the score; None before scoring, and where scoring failed.
        reward_failure: why scoring failed, if it was tried.
        metrics: further numbers from the reward, by name.
        seconds: wall time of the rollout by activity: ``total``, ``generation``, ``tools``, ``waiting`` (for resources,
            inside tools or rewards), ``reward``. Activities of subagents count as ``generation`` and ``tools``, and add
            up where subagents run at the same time.
        untrainable_reason: why a valid trajectory must not be trained on; empty if it may. Evaluations count it like
            others.
        notes: further remarks for readers of the record.
    """

    rollout_id: str
    group_id: str
    task: Task
    attempt: int = 0
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sequences: list[TokenSequence] = field(default_factory=list)
    subagents: dict[str, list[Message]] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    failure: Failure | None = None
    reward: float | None = None
    reward_failure: Failure | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    untrainable_reason: str = ""
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """A line: `agentfly.trajectory_text` shows the whole."""
        turns = f"{len(self.turns)} turn{'s' * (len(self.turns) != 1)}"
        failure = self.failure or self.reward_failure
        parts = [
            repr(self.rollout_id),
            f"task={self.task.id!r}",
            turns,
            f"finish_reason={str(self.finish_reason or None)!r}",
        ]
        parts += [f"reward={self.reward!r}", *([f"failure={failure.kind}"] if failure is not None else [])]
        return f"Trajectory({', '.join(parts)})"

    @property
    def response(self) -> str:
        """The visible text of the main agent's last turn, without reasoning where the format separates it."""
        own = (turn.visible_text for turn in reversed(self.turns) if turn.kind == "act" and not turn.agent)
        return next(own, "")

    @property
    def infrastructure_failed(self) -> bool:
        """Whether the rollout or its score failed for a reason that the policy could not have caused."""
        return any(failure is not None and not failure.by_policy for failure in (self.failure, self.reward_failure))

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens of every turn of the rollout's own policy are known."""
        return all(turn.sequence >= 0 for turn in self.turns if not turn.other_model)

    @property
    def own_sequences(self) -> list[TokenSequence]:
        """The sequences that the rollout's own policy sampled, without those of other models."""
        others = {turn.sequence for turn in self.turns if turn.other_model}
        return [sequence for number, sequence in enumerate(self.sequences) if number not in others]

    @property
    def trainable(self) -> bool:
        """Whether the trajectory may enter a loss or a baseline: scored, valid, and with sampled tokens."""
        return (
            self.reward is not None
            and not self.infrastructure_failed
            and not self.untrainable_reason
            and self.has_tokens
            and any(sequence.sampled_count for sequence in self.own_sequences)
        )

    def copy(self) -> Trajectory:
        """Return a copy with its own task, lists and mappings. Turns and token sequences are shared."""
        return replace(
            self,
            task=self.task.copy(),
            messages=own_copy(self.messages),
            turns=list(self.turns),
            sequences=list(self.sequences),
            subagents=own_copy(self.subagents),
            metrics=dict(self.metrics),
            seconds=dict(self.seconds),
            notes=list(self.notes),
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-able value that `from_json` turns back into an equal trajectory."""
        return {
            "rollout_id": self.rollout_id,
            "group_id": self.group_id,
            "attempt": self.attempt,
            "task": {"id": self.task.id, "prompt": self.task.prompt_to_json(), "fields": dict(self.task.fields)},
            "messages": [message_to_json(message) for message in self.messages],
            "turns": [_turn_to_json(turn) for turn in self.turns],
            "sequences": [sequence.to_json() for sequence in self.sequences],
            "subagents": {
                name: [message_to_json(message) for message in messages] for name, messages in self.subagents.items()
            },
            "finish_reason": self.finish_reason,
            "failure": asdict(self.failure) if self.failure else None,
            "reward": self.reward,
            "reward_failure": asdict(self.reward_failure) if self.reward_failure else None,
            "metrics": self.metrics,
            "seconds": self.seconds,
            "untrainable_reason": self.untrainable_reason,
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Trajectory:
        """The inverse of `to_json`.

        Raises:
            ConfigError: it is nothing that `to_json` gives, because it is damaged or of another version.
        """
        try:
            return cls._of_json(value)
        except (AgentFlyError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                "This is no trajectory as it is saved here, it is damaged or of another version "
                f"({describe_error(error)})."
            ) from error

    @classmethod
    def _of_json(cls, value: dict[str, Any]) -> Trajectory:
        for name, kind in _KINDS.items():
            if not isinstance(value[name], kind):
                raise TypeError(f"{name} is {type_of(value[name])}")
        scores = value["metrics"] if value["reward"] is None else {**value["metrics"], "reward": value["reward"]}
        for name, number in scores.items():
            if score_of(number) is None:
                raise ValueError(f"{name} is {number!r:.100}, which is no finite number up to 1e30")
        trajectory = cls(
            rollout_id=value["rollout_id"],
            group_id=value["group_id"],
            attempt=value["attempt"],
            task=Task(**value["task"]),
            messages=[message_from_json(message) for message in value["messages"]],
            turns=[_turn_from_json(turn) for turn in value["turns"]],
            sequences=[TokenSequence.from_json(sequence) for sequence in value["sequences"]],
            subagents={name: list(map(message_from_json, said)) for name, said in value["subagents"].items()},
            finish_reason=FinishReason(value["finish_reason"]) if value["finish_reason"] else None,
            failure=_failure_from_json(value["failure"]),
            reward=value["reward"],
            reward_failure=_failure_from_json(value["reward_failure"]),
            metrics=value["metrics"],
            seconds=value["seconds"],
            untrainable_reason=value["untrainable_reason"],
            notes=value["notes"],
        )
        for turn in trajectory.turns:
            place = (turn.sequence, turn.start, turn.stop)
            if {*map(type, place)} != {int} or not -1 <= turn.sequence < len(trajectory.sequences):
                raise ValueError(f"turn {turn.index} has no place at {place} in {len(trajectory.sequences)} sequences")
            if not all(type(number) is int and 0 <= number < turn.index for number in turn.parent_turns or ()):
                raise ValueError(f"turn {turn.index} follows the turns {turn.parent_turns}")
        return trajectory


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("rollout_id", "group_id", "untrainable_reason"), str),
    "notes": list,
    "attempt": int,
    "reward": float | int | None,
    **dict.fromkeys(("metrics", "seconds"), dict),
}
"""Types of a stored trajectory's values that nothing else checks."""


def require_trajectories(given: object, of: str) -> list[Trajectory]:
    """Return a user's argument as a list of trajectories.

    Args:
        given: an iterable of trajectories.
        of: name of the function that was called, for the message.

    Raises:
        UsageError: it is something else, such as the result of a run, a path or one trajectory.
    """
    if isinstance(given, Trajectory):
        raise UsageError(f"{of} takes a list of trajectories, and was given one. Write [trajectory].")
    if isinstance(given, str | Path):
        raise UsageError(
            f"{of} takes trajectories, and was given {str(given)!r:.100}. Read those of a file by "
            "agentfly.core.trajectory.load_trajectories(path)."
        )
    if isinstance(given, Iterable):
        found = list(given)
        wrong = next((one for one in found if not isinstance(one, Trajectory)), None)
        if wrong is None:
            return found
        raise UsageError(f"{of} takes trajectories, and {type_of(wrong)} is among what it was given.")
    raise UsageError(_no_trajectory(given, f"{of} takes trajectories", "result.trajectories"))


def require_trajectory(given: object, of: str) -> Trajectory:
    """Return a user's argument as a trajectory. Raises like `require_trajectories`."""
    if isinstance(given, Trajectory):
        return given
    raise UsageError(_no_trajectory(given, f"{of} takes one trajectory", "result.trajectories[0]"))


def _no_trajectory(given: object, wanted: str, within: str) -> str:
    cure = f"Write {within}" if hasattr(given, "trajectories") else f"After result = await af.run(…) write {within}"
    return f"{wanted}, and was given {type_of(given)}. {cure}."


def save_trajectories(trajectories: Iterable[Trajectory], path: Path | str, *, append: bool = False) -> None:
    """Write trajectories as JSON lines, one per line. A new file appears only once it is complete.

    Args:
        trajectories: the trajectories.
        path: the file.
        append: keep the file's content, except for a last line that a crash truncated.
    """
    lines = map(trajectory_json_line, trajectories)
    if append:
        append_lines(Path(path), lines)
        return
    with atomic_write(Path(path)) as file:
        file.writelines(line.encode("utf-8") for line in lines)


def load_trajectories(path: Path | str) -> Iterator[Trajectory]:
    """Read trajectories that `save_trajectories` wrote. A last line that a crash truncated is left out.

    Raises:
        ConfigError: a line is not a trajectory; the message names the file and line.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if is_whole_line(line):
                yield _trajectory_in(line, path, number)


def _trajectory_in(line: bytes, path: Path | str, number: int) -> Trajectory:
    try:
        return Trajectory.from_json(json.loads(line.decode("utf-8")))
    except (ConfigError, ValueError, RecursionError) as error:
        reason = error_message(error) if isinstance(error, ConfigError) else f"It is not JSON ({error_message(error)})."
        cure = "Remove the line, or name a file that a run has written."
        if number == 1:  # more likely another kind of file than a damaged line
            cure = (
                "Name a file of trajectories that a run has written, such as runs/mine/trajectories/eval-000060.jsonl."
            )
        raise ConfigError(f"{path}, line {number}: {reason} {cure}") from error


def trajectory_json_line(trajectory: Trajectory, **besides: Any) -> str:
    """Return a trajectory as one line of JSON, with its line end. ``besides`` adds further keys."""
    return to_json_line(trajectory.to_json() | besides) + "\n"


def _failure_from_json(value: dict[str, Any] | None) -> Failure | None:
    return Failure(**{**value, "boundary": Boundary(value["boundary"])}) if value else None


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    value = asdict(turn)
    for result, record in zip(value["tool_results"], turn.tool_results, strict=True):
        result["images"] = [image.url for image in record.images]
    return value


def _turn_from_json(value: dict[str, Any]) -> Turn:
    results, parent_turns = tuple(map(_record_from_json, value["tool_results"])), value["parent_turns"]
    return Turn(
        **{**value, "tool_results": results, "parent_turns": None if parent_turns is None else tuple(parent_turns)}
    )


def _record_from_json(value: dict[str, Any]) -> ToolRecord:
    return ToolRecord(
        **{
            **value,
            "call": ToolCall(**value["call"]),
            "failure": _failure_from_json(value["failure"]),
            "images": tuple(map(Image.from_url, value["images"])),
        }
    )
