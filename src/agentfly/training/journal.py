"""Journal: the rollouts that have ended and are in no step's file yet, so that a killed run does not run them again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentfly.core.errors import ConfigError, PrerequisiteError, describe_error
from agentfly.core.run_directory import replace_text
from agentfly.core.threads.run import DedicatedThread
from agentfly.core.trajectory import Trajectory, trajectory_json_line
from agentfly.rollouts.backlog import AttemptGroup
from agentfly.rollouts.rollout_record import StoredRollout, has_finished, open_locked


class Journal:
    """A file for each group whose attempts are under way or wait to be trained; its lines are those that have ended.

    A group is known by its id, which in a training run is its place in the order of tasks: the same in a resumed run.
    Once a step's own file holds a group, `remove_groups` removes its file here. What infrastructure spoiled is run again.

    Args:
        directory: where the files are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[str, dict[int, StoredRollout]] = {}
        self._writer = DedicatedThread()

    @property
    def _manifest_file(self) -> Path:
        return self._directory / "manifest.json"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Within the block rollouts are kept. One process trains in a run's directory at a time.

        Raises:
            ConfigError: another process does.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        lock = self._directory / ".lock"
        file = open_locked(lock)
        try:
            yield
        finally:
            await asyncio.shield(self._writer.start(lambda: None))  # what is being written comes to its end
            self._writer.close()
            lock.unlink(missing_ok=True)
            file.close()
            with contextlib.suppress(OSError):
                self._directory.rmdir()

    # --- what the run is a run of, before there is a checkpoint that says so ------------------------------------------

    def read_manifest(self) -> dict[str, Any] | None:
        """What `begin` was told last; None if that is not known."""
        try:
            value: dict[str, Any] = json.loads(self._manifest_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value

    def write_manifest(self, with_: dict[str, Any]) -> None:
        """A run begins: remember what it is made with, as plain values, until there is a checkpoint that says so."""
        replace_text(self._manifest_file, json.dumps(with_))

    def remove_manifest(self) -> None:
        """There is a checkpoint that says what the run is made with."""
        self._manifest_file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget everything."""
        for path in self._directory.glob("*.json*"):
            path.unlink()

    # --- as the record of a batch -------------------------------------------------------------------------------------

    def finished(self, group: AttemptGroup, attempt: int) -> StoredRollout | None:
        """What came of an attempt that had finished before.

        Raises:
            ConfigError: the task is another than the one that the attempt was made at.
        """
        if group.group_id not in self._found:
            self._found[group.group_id] = self._read(self._file(group.group_id))
        found = self._found[group.group_id].pop(attempt, None)
        if attempt == group.attempts - 1:
            del self._found[group.group_id]
        if found is None or found.trajectory.task.id != group.task.id:
            return None  # with a curriculum, another task may have come to this place in a run of other length
        if found.trajectory.task.canonical_json != group.task.canonical_json:
            raise ConfigError(
                f"The rollouts in {self._directory} cannot be gone on with: the task {group.task.id!r} is another than "
                "it was. Give tasks that have changed another id, or begin a new run."
            )
        return found

    def append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], *, scored: bool) -> asyncio.Future[None]:
        """Have trajectories of a group written; done when the system has them. The last line on an attempt counts."""
        return self._writer.start(self._append, group.group_id, tuple(trajectories), scored)

    async def remove_groups(self, group_ids: Iterable[str]) -> None:
        """Remove the files of groups."""
        paths = [self._file(group_id) for group_id in group_ids]

        def remove() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        await self._writer.start(remove)

    # --- files --------------------------------------------------------------------------------------------------------

    def _file(self, group_id: str) -> Path:
        return self._directory / f"{group_id}.jsonl"

    def _read(self, path: Path) -> dict[int, StoredRollout]:
        """The attempts in a file; a last line that was cut by the end of the process that wrote it is taken away.

        Raises:
            ConfigError: a line is none that was written here.
        """
        found: dict[int, StoredRollout] = {}
        if not path.is_file():
            return found
        whole = 0
        with path.open("rb+") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    value = json.loads(line)
                    trajectory, scored = Trajectory.from_json(value), bool(value["scored"])
                except (ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ConfigError(
                        f"The run cannot be gone on with: {path}, line {number} is no rollout of it ({describe_error(error)}). "
                        "Remove that line, and the rollout is made again."
                    ) from error
                found[trajectory.attempt] = StoredRollout(trajectory, scored)
                whole += len(line)
            file.truncate(whole)
        return {attempt: finished for attempt, finished in found.items() if has_finished(finished.trajectory)}

    def _append(self, group_id: str, trajectories: tuple[Trajectory, ...], scored: bool) -> None:
        path = self._file(group_id)
        lines = "".join(trajectory_json_line(trajectory, scored=scored) for trajectory in trajectories).encode("utf-8")
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            with contextlib.suppress(OSError):  # what has got there of a line would spoil the next
                os.truncate(path, before)
            raise PrerequisiteError(
                f"The rollouts of the run cannot be kept in {self._directory}: {error.strerror}. Free some space, and "
                "go on with --resume (in Python: resume=True)."
            ) from error
