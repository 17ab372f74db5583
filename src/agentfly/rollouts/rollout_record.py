"""Record of finished rollouts, from which an interrupted run resumes, with the settings that they were made with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from agentfly.agents.agent import Agent, Subagent
from agentfly.agents.tool import Tool
from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.files import append_or_restore, atomic_write, is_same_file, recover_lines, replace_text, try_lock
from agentfly.core.threads.run import DedicatedThread
from agentfly.core.trajectory import FinishReason, Trajectory, trajectory_json_line
from agentfly.rollouts.backlog import AttemptGroup

LONGEST = 100
"""Longest setting, in characters, that is stored as it is. Longer ones are stored as hashes."""

_FINGERPRINT = "sha256:"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_SAMPLING = ("temperature", "top_p", "top_k")
_LISTED_APART = ("model", "tools", "system_prompt", "tool_prompt", "tool_call_format")


def agent_fingerprint(agent: Agent) -> dict[str, Any]:
    """Return the settings of an agent that determine its rollouts, besides model and sampling. Long ones are hashed."""
    tools = {f"tool {tool.name}": fingerprint(_tool_settings(tool, agent)) for tool in agent.tools}
    settings = {
        field.name: fingerprint_value(getattr(agent, field.name))
        for field in fields(agent)
        if field.name not in _SAMPLING + _LISTED_APART
    }
    return {
        "system message": fingerprint(agent.system_message()),
        "tool-call format": agent.format.name,
        **tools,
        **settings,
    }


def fingerprint(value: Any) -> str:
    """Return a short hash of a JSON value, for values that are too long to store or show."""
    text = json.dumps(value, sort_keys=True, default=str)
    return _FINGERPRINT + hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_differences(saved: Mapping[str, Any], now: Mapping[str, Any], owner: str = "") -> Iterator[str]:
    """Yield a message for each setting that differs, with both values.

    Args:
        saved, now: the settings by name.
        owner: prefix of the names in messages, for instance ``the agent's``.
    """
    for name in {**saved, **now}:
        before, after = saved.get(name), now.get(name)
        if before == after:
            continue
        called = f"{owner} {name}" if owner else name
        if any(isinstance(value, str) and value.startswith(_FINGERPRINT) for value in (before, after)):
            yield f"{called} {'is new' if before is None else 'is missing' if after is None else 'has changed'}"
        else:
            yield f"{called} was {before!r} and is now {after!r}"


def _tool_settings(tool: Tool, caller: Agent) -> list[Any]:
    if not isinstance(tool, Subagent):
        return [tool.definition]
    model = None if tool.agent.model == caller.model else str(tool.agent.model)
    return [tool.definition, agent_fingerprint(tool.agent), model]


def fingerprint_value(value: Any) -> Any:
    """Return a setting as a JSON value. An object is stored as its repr, without memory addresses."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    text = _ADDRESS.sub("", repr(value))
    return text if len(text) <= LONGEST else fingerprint(text)


RolloutKey = tuple[str, int, int]
"""Identifies a rollout across runs: the task's id, the number of its occurrence, and the attempt."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout that finished in an earlier run.

    Attributes:
        trajectory: its trajectory.
        scored: whether it is complete. If not, its group had not been scored.
    """

    trajectory: Trajectory
    scored: bool


class RolloutStore(Protocol):
    """Stores the finished rollouts of a batch, and finds those of an earlier run."""

    def finished(self, group: AttemptGroup, attempt: int) -> StoredRollout | None:
        """Return an attempt that finished in an earlier run; None if it must be run."""
        ...

    def append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], *, scored: bool) -> asyncio.Future[None]:
        """Start to write trajectories. The future is done once they survive the end of this process.

        Args:
            group: the group of the trajectories.
            trajectories: finished attempts.
            scored: whether they are complete, so that no score is still to come.
        """
        ...


@dataclass(frozen=True, slots=True)
class _LineSpan:
    """The bytes of a rollout's last record in the file, and its sort key: group number and attempt."""

    start: int
    stop: int
    order: tuple[int, int]


class RolloutRecord:
    """A file of trajectories as JSON lines, appended as rollouts finish. Each line is written completely or not at all.

    A file ``….settings.json`` beside it holds the settings of the rollouts, so rollouts of different agents are never
    mixed. A rollout is identified by its task's id and its attempt; tasks with the same id are distinguished by their
    order. Cancelled rollouts and infrastructure failures are recorded and count as not finished.

    Args:
        path: the file. Its directory must exist when the record is opened.
        resume: continue an existing file; otherwise the file must not exist.

    Raises:
        ConfigError: the file exists and ``resume`` is False, or its settings are not known.
    """

    def __init__(self, path: Path | str, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._finished: dict[RolloutKey, StoredRollout] = {}
        self._lines: dict[RolloutKey, _LineSpan] = {}
        self._end = 0
        self._opened = False
        self._file: FileIO | None = None
        self._writer = DedicatedThread()
        self._saved = self._read_settings() if resume else None
        # A file that is empty and has no settings was left by a process that died before its first rollout.
        begun = self.settings_file.exists() or (self.path.exists() and self.path.stat().st_size > 0)
        if self.path.exists() and begun and not resume:
            raise ConfigError(
                f"{self.path} already holds rollouts. Resume the run (resume=True; on the command line --resume), "
                "choose another directory, or remove the file."
            )
        if self.path.exists() and begun and self._saved is None:
            raise ConfigError(
                f"The run in {self.path} cannot be resumed: there is no {self.settings_file}, so the settings of its "
                "rollouts are not known. Begin a new run."
            )

    @property
    def settings_file(self) -> Path:
        """The file with the settings of the rollouts."""
        return self.path.with_suffix(".settings.json")

    @property
    def info(self) -> Mapping[str, Any]:
        """The ``about`` of the run that is resumed; empty if none is."""
        return {} if self._saved is None else self._saved["about"]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run that is resumed; empty if none is."""
        return {} if self._saved is None else self._saved["settings"]

    @asynccontextmanager
    async def opened(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> AsyncIterator[None]:
        """Record rollouts inside the block. On resume, first load the rollouts of the earlier run.

        When the block ends, the file holds each rollout once, in the order of tasks and attempts. If nothing was
        recorded, no file remains. Only one process can record in a file at a time.

        Args:
            settings: the settings of the rollouts, as JSON values. On resume they must be unchanged.
            about: further information about the run, as JSON values. It may change.

        Raises:
            ConfigError: the settings differ from those of the resumed run, or another process is recording in the file.
        """
        now = json.loads(json.dumps(dict(settings)))
        if self._saved is not None and (others := list(describe_differences(self._saved["settings"], now))):
            raise ConfigError(
                f"The run in {self.path} cannot be resumed with other settings than it was begun with: "
                f"{'; '.join(others)}. Restore them, or begin a new run."
            )
        try:
            await self._writer.start(self._open, {"about": dict(about), "settings": now})
            yield
            await self._writer.start(self._compact)
        except BaseException:
            with contextlib.suppress(OSError):  # the disk may be full; the other error matters more
                await asyncio.shield(self._writer.start(self._compact))
            raise
        finally:
            closing = self._writer.start(self._close)
            self._writer.close()
            await closing

    @property
    def recorded(self) -> int:
        """Number of finished rollouts on record that `finished` has not returned yet; 0 before it is opened."""
        return len(self._finished)

    def finished(self, group: AttemptGroup, attempt: int) -> StoredRollout | None:
        """Return an attempt that finished in an earlier run, with the ids of this run. It is returned only once.

        Raises:
            ConfigError: the task has changed since the attempt.
        """
        finished = self._finished.pop((group.task.id, group.occurrence, attempt), None)
        if finished is None:
            return None
        trajectory = finished.trajectory
        if trajectory.task.canonical_json != group.task.canonical_json:
            raise ConfigError(
                f"The run in {self.path} cannot be resumed: the task {group.task.id!r} has changed. Give changed tasks "
                "a new id, or begin a new run."
            )
        if trajectory.group_id != group.group_id:  # the order of the tasks has changed
            trajectory.group_id, trajectory.rollout_id = group.group_id, f"{group.group_id}.{attempt}"
            self.append(group, [trajectory], scored=finished.scored)
        return finished

    def append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], *, scored: bool) -> asyncio.Future[None]:
        """Start to write trajectories. The future is done once the operating system has them.

        They then survive the end of this process. They replace earlier records of the same rollouts.

        Args:
            group: the group of the trajectories.
            trajectories: finished attempts.
            scored: whether they are complete, so that no score is still to come.
        """
        return self._writer.start(self._append, group, tuple(trajectories), scored)

    # --- on the writer's thread ---------------------------------------------------------------------------------------

    def _open(self, saved: dict[str, Any]) -> None:
        self._file = open_locked(self.path)
        self._read()
        replace_text(self.settings_file, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")
        self._opened = True

    def _read(self) -> None:
        for number, line in recover_lines(self.path):
            try:
                value = json.loads(line)
                trajectory, occurrence = Trajectory.from_json(value), int(value["occurrence"])
                finished = StoredRollout(trajectory, bool(value["scored"]))
                self._note((trajectory.task.id, occurrence, trajectory.attempt), trajectory, len(line))
            except (ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"The run in {self.path} cannot be resumed: line {number} is not a rollout "
                    f"({type(error).__name__}: {error}). Remove that line, or begin a new run."
                ) from error
            if has_finished(trajectory):
                self._finished[trajectory.task.id, occurrence, trajectory.attempt] = finished

    def _append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], scored: bool) -> None:
        assert self._file is not None  # opened before the first rollout begins
        for trajectory in trajectories:
            line = trajectory_json_line(trajectory, occurrence=group.occurrence, scored=scored).encode("utf-8")
            if not is_same_file(self._file.fileno(), self.path):
                raise PrerequisiteError(
                    f"{self.path} was moved or removed while rollouts were recorded in it. Restore it if possible, and "
                    "continue with --resume (in Python: resume=True)."
                )
            try:
                append_or_restore(self._file.fileno(), line)
            except OSError as error:
                raise PrerequisiteError(
                    f"The rollouts of the run cannot be recorded in {self.path}: {error.strerror}. Free some space, "
                    "and continue with --resume (in Python: resume=True)."
                ) from error
            self._note((group.task.id, group.occurrence, trajectory.attempt), trajectory, len(line))

    def _note(self, key: RolloutKey, trajectory: Trajectory, length: int) -> None:
        number = int(trajectory.group_id.rpartition("-")[2])
        self._lines[key] = _LineSpan(self._end, self._end + length, (number, trajectory.attempt))
        self._end += length

    def _compact(self) -> None:
        if self._file is None or not self._opened:  # the existing file has not been read completely
            return
        lines = sorted(self._lines.values(), key=lambda line: line.order)
        stops = [0, *(line.stop for line in lines)]
        if [*(line.start for line in lines), self._end] == stops:
            return
        with self.path.open("rb") as source, atomic_write(self.path, durable=False) as target:
            for line in lines:
                source.seek(line.start)
                target.write(source.read(line.stop - line.start))
        self._file.close()  # only now, so that the next process to lock this file notices that it was replaced
        self._file = None

    def _close(self) -> None:
        if self._file is None:
            return
        if self._opened and not self._lines:
            for path in (self.settings_file, self.path):  # before the lock is released
                path.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _read_settings(self) -> dict[str, Any] | None:
        if not self.settings_file.is_file():
            return None
        try:
            saved = json.loads(self.settings_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            saved = None
        if isinstance(saved, dict) and all(isinstance(saved.get(part), dict) for part in ("about", "settings")):
            return saved
        raise ConfigError(
            f"The run in {self.path} cannot be resumed: {self.settings_file}, which holds its settings, "
            "is damaged. Begin a new run."
        )


def open_locked(path: Path) -> FileIO:
    """Open a file for appending and lock it until it is closed. The file is created if needed.

    It is unbuffered, so a line that could not be written is not written later.

    Raises:
        ConfigError: another process has locked it.
        PrerequisiteError: it cannot be opened.
    """
    while True:
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            raise PrerequisiteError(
                f"{path} cannot be opened to append rollouts: {error.strerror}. Choose a directory that you may write "
                "to."
            ) from error
        if not try_lock(file.fileno()):
            file.close()
            raise ConfigError(f"Another process is recording rollouts in {path}. Wait for its end, or stop it.")
        if is_same_file(file.fileno(), path):
            return file
        file.close()  # it was replaced or removed meanwhile


def has_finished(trajectory: Trajectory) -> bool:
    """Return whether an attempt has finished and need not be run again."""
    return trajectory.finish_reason is not FinishReason.CANCELLED and not trajectory.infrastructure_failed
