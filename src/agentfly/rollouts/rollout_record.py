"""Record of finished rollouts, from which an interrupted run resumes, with the settings that they were made with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
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
from agentfly.core.files import atomic_write, is_same_file, replace_text, try_lock
from agentfly.core.threads.run import DedicatedThread
from agentfly.core.trajectory import FinishReason, Trajectory, trajectory_json_line
from agentfly.rollouts.backlog import AttemptGroup

LONGEST = 100
"""Characters of a setting that is kept as it is."""

_FINGERPRINT = "sha256:"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_SAMPLING = ("temperature", "top_p", "top_k")
_WORDS = ("model", "tools", "system_prompt", "tool_prompt", "tool_call_format")


def agent_fingerprint(agent: Agent) -> dict[str, Any]:
    """What of an agent shapes its rollouts, besides model and sampling: words and tools as fingerprints, and limits."""
    tools = {f"tool {tool.name}": fingerprint(_traits_of_tool(tool, agent)) for tool in agent.tools}
    settings = {
        field.name: fingerprint_value(getattr(agent, field.name))
        for field in fields(agent)
        if field.name not in _SAMPLING + _WORDS
    }
    return {
        "system message": fingerprint(agent.system_message()),
        "tool-call format": agent.format.name,
        **tools,
        **settings,
    }


def fingerprint(value: Any) -> str:
    """A value that is too long to be shown, as something that is equal where it is."""
    text = json.dumps(value, sort_keys=True, default=str)
    return _FINGERPRINT + hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_differences(saved: Mapping[str, Any], now: Mapping[str, Any], whose: str = "") -> Iterator[str]:
    """What is not as it was, in words, each with both values.

    Args:
        saved, now: by name.
        whose: goes before the names, for instance ``the agent's``.
    """
    for name in {**saved, **now}:
        before, after = saved.get(name), now.get(name)
        if before == after:
            continue
        called = f"{whose} {name}" if whose else name
        if any(isinstance(value, str) and value.startswith(_FINGERPRINT) for value in (before, after)):
            yield f"{called} is {'new' if before is None else 'missing' if after is None else 'another'}"
        else:
            yield f"{called} was {before!r} and is now {after!r}"


def _traits_of_tool(tool: Tool, caller: Agent) -> list[Any]:
    if not isinstance(tool, Subagent):
        return [tool.definition]
    model = None if tool.agent.model == caller.model else str(tool.agent.model)
    return [tool.definition, agent_fingerprint(tool.agent), model]


def fingerprint_value(value: Any) -> Any:
    """A setting as JSON keeps it; an object by what it says of itself, without where it lies in memory."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    said = _ADDRESS.sub("", repr(value))
    return said if len(said) <= LONGEST else fingerprint(said)


RolloutKey = tuple[str, int, int]
"""What a rollout is known by from one run to the next: id of the task, number of its occurrence, attempt."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """What came of a rollout in an earlier run.

    Attributes:
        trajectory: its record.
        scored: whether nothing more was to happen to it; else the score of its group was still to come.
    """

    trajectory: Trajectory
    scored: bool


class RolloutStore(Protocol):
    """Where a batch has its rollouts written as they end, and finds those that had ended in an earlier run."""

    def finished(self, group: AttemptGroup, attempt: int) -> StoredRollout | None:
        """What came of an attempt that had finished before; None if it is still to be made."""
        ...

    def append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], *, scored: bool) -> asyncio.Future[None]:
        """Have trajectories written; done when the end of this process takes none away.

        Args:
            group: whose they are.
            trajectories: what came of the attempts.
            scored: whether nothing more will happen to them.
        """
        ...


@dataclass(frozen=True, slots=True)
class _LineSpan:
    """Where the last word on a rollout stands in the file, and where it belongs."""

    start: int
    stop: int
    place: tuple[int, int]


class RolloutRecord:
    """Trajectories as JSON lines, appended one by one as rollouts finish, each a whole line or not there at all.

    Beside the file, ``….settings.json`` says what the rollouts are made with, so that they are never mixed with those
    of another agent. A rollout is known again by its task's id and its attempt; tasks of the same id are told apart by
    their order. What was cancelled, or spoiled by infrastructure, is recorded and counts as not finished.

    Args:
        path: the file, in a directory that exists when it is opened.
        resume: go on with what is there; else there must be nothing.

    Raises:
        ConfigError: there is something and it is not to be gone on with, or it is not known what it was made with.
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
        if self.path.exists() and not resume:
            raise ConfigError(
                f"{self.path} holds rollouts already. Go on with them (resume=True; on the command line --resume), "
                "choose another directory, or remove it."
            )
        if self.path.exists() and self._saved is None:
            raise ConfigError(
                f"The rollouts in {self.path} cannot be gone on with: there is no {self.settings_file}, so it is not "
                "known what they were made with. Begin a new run."
            )

    @property
    def settings_file(self) -> Path:
        """The file that says what the rollouts were made with."""
        return self.path.with_suffix(".settings.json")

    @property
    def info(self) -> Mapping[str, Any]:
        """What was said about the rollouts that are gone on with, when they were begun; empty if there are none."""
        return {} if self._saved is None else self._saved["about"]

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the rollouts that are gone on with were made with; empty if there are none."""
        return {} if self._saved is None else self._saved["settings"]

    @asynccontextmanager
    async def opened(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> AsyncIterator[None]:
        """Record rollouts inside the block. On resume, first load the rollouts of the earlier run.

        When it ends, each rollout is in the file once, in the order of the tasks and attempts. Where nothing was
        recorded, no file is left. Only one process records in a file at a time.

        Args:
            settings: what the rollouts are made with, JSON-able; it has to be as it was.
            about: what is to be known of them later on, which may change; JSON-able.

        Raises:
            ConfigError: the settings are others than those of the run that is gone on with; or another process is at
                work on it.
        """
        now = json.loads(json.dumps(dict(settings)))
        if self._saved is not None and (others := list(describe_differences(self._saved["settings"], now))):
            raise ConfigError(
                f"The rollouts in {self.path} cannot be gone on with under other settings than they were begun with: "
                f"{'; '.join(others)}. Put them back, or begin a new run."
            )
        try:
            await self._writer.start(self._open, {"about": dict(about), "settings": now})
            yield
            await self._writer.start(self._compact)
        except BaseException:
            with contextlib.suppress(OSError):  # the disk may be full, and it is another error that matters
                await asyncio.shield(self._writer.start(self._compact))
            raise
        finally:
            closing = self._writer.start(self._close)
            self._writer.close()
            await closing

    @property
    def recorded(self) -> int:
        """Number of sound rollouts on record that `finished` has not been asked for yet; 0 before it is opened."""
        return len(self._finished)

    def finished(self, group: AttemptGroup, attempt: int) -> StoredRollout | None:
        """What came of an attempt that had finished before, under the names of this run. It is answered once.

        Raises:
            ConfigError: the task is another than the one that the attempt was made at.
        """
        finished = self._finished.pop((group.task.id, group.occurrence, attempt), None)
        if finished is None:
            return None
        trajectory = finished.trajectory
        if trajectory.task.canonical_json != group.task.canonical_json:
            raise ConfigError(
                f"The rollouts in {self.path} cannot be gone on with: the task {group.task.id!r} is another than it "
                "was. Give tasks that have changed another id, or begin a new run."
            )
        if trajectory.group_id != group.group_id:  # the tasks come in another order
            trajectory.group_id, trajectory.rollout_id = group.group_id, f"{group.group_id}.{attempt}"
            self.append(group, [trajectory], scored=finished.scored)
        return finished

    def append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], *, scored: bool) -> asyncio.Future[None]:
        """Have trajectories written; done when the system has them, so that the end of this process takes none away.

        What was written of the same rollouts before no longer counts.

        Args:
            group: whose they are.
            trajectories: what came of the attempts.
            scored: whether nothing more will happen to them.
        """
        return self._writer.start(self._append, group, tuple(trajectories), scored)

    # --- on the writer's thread ---------------------------------------------------------------------------------------

    def _open(self, saved: dict[str, Any]) -> None:
        self._file = open_locked(self.path)
        self._read()
        replace_text(self.settings_file, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")
        self._opened = True

    def _read(self) -> None:
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # cut by the end of the process that wrote it
                    break
                try:
                    value = json.loads(line)
                    trajectory, occurrence = Trajectory.from_json(value), int(value["occurrence"])
                    finished = StoredRollout(trajectory, bool(value["scored"]))
                    self._note((trajectory.task.id, occurrence, trajectory.attempt), trajectory, len(line))
                except (ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ConfigError(
                        f"The rollouts in {self.path} cannot be gone on with: line {number} is not one of them "
                        f"({type(error).__name__}: {error}). Remove that line, or begin a new run."
                    ) from error
                if has_finished(trajectory):
                    self._finished[trajectory.task.id, occurrence, trajectory.attempt] = finished
            file.truncate(self._end)

    def _append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], scored: bool) -> None:
        assert self._file is not None  # opened before the first rollout begins
        for trajectory in trajectories:
            line = trajectory_json_line(trajectory, occurrence=group.occurrence, scored=scored).encode("utf-8")
            if not is_same_file(self._file.fileno(), self.path):
                raise PrerequisiteError(
                    f"{self.path} was moved or removed while rollouts were recorded in it. Put it back, if it is still "
                    "there, and go on with --resume (in Python: resume=True)."
                )
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:  # the disk is full, say; what has got there of the line would spoil the next
                with contextlib.suppress(OSError):
                    os.truncate(self._file.fileno(), self._end)
                raise PrerequisiteError(
                    f"The rollouts of the run cannot be recorded in {self.path}: {error.strerror}. Free some space, "
                    "and go on with --resume (in Python: resume=True)."
                ) from error
            self._note((group.task.id, group.occurrence, trajectory.attempt), trajectory, len(line))

    def _note(self, key: RolloutKey, trajectory: Trajectory, length: int) -> None:
        number = int(trajectory.group_id.rpartition("-")[2])
        self._lines[key] = _LineSpan(self._end, self._end + length, (number, trajectory.attempt))
        self._end += length

    def _compact(self) -> None:
        if self._file is None or not self._opened:  # what is there has not been read to its end
            return
        lines = sorted(self._lines.values(), key=lambda line: line.place)
        stops = [0, *(line.stop for line in lines)]
        if [*(line.start for line in lines), self._end] == stops:
            return
        with self.path.open("rb") as source, atomic_write(self.path, durable=False) as target:
            for line in lines:
                source.seek(line.start)
                target.write(source.read(line.stop - line.start))
        self._file.close()  # only now: the next process to lock this file finds that it was replaced
        self._file = None

    def _close(self) -> None:
        if self._file is None:
            return
        if self._opened and not self._lines:
            for path in (self.settings_file, self.path):  # while the lock is held, as above
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
            f"The rollouts in {self.path} cannot be gone on with: {self.settings_file}, which says what they were made "
            "with, is damaged. Begin a new run."
        )


def open_locked(path: Path) -> FileIO:
    """A file to be added to, made if it is not there, that no other process adds to until it is closed.

    It has no buffer, in which a line that could not be written would wait for the next.

    Raises:
        ConfigError: another process has it.
        PrerequisiteError: it cannot be opened.
    """
    while True:
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            raise PrerequisiteError(
                f"{path} cannot be opened to add rollouts to it: {error.strerror}. Choose a directory that you may "
                "write."
            ) from error
        if not try_lock(file.fileno()):
            file.close()
            raise ConfigError(f"Another process is adding rollouts to {path}. Wait for its end, or stop it.")
        if is_same_file(file.fileno(), path):
            return file
        file.close()  # it was replaced or removed a moment ago


def has_finished(trajectory: Trajectory) -> bool:
    """Whether an attempt came to an end that counts, and is not to be made again."""
    return trajectory.finish_reason is not FinishReason.CANCELLED and not trajectory.infrastructure_failed
