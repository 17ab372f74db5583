"""Journal: finished rollouts that no step's file contains yet. A resumed run does not repeat them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentfly.core.errors import ConfigError, PrerequisiteError, describe_error
from agentfly.core.files import append_or_restore, recover_lines, replace_text
from agentfly.core.threads.run import DedicatedThread
from agentfly.core.trajectory import Trajectory, trajectory_json_line
from agentfly.rollouts.backlog import AttemptGroup
from agentfly.rollouts.rollout_record import StoredRollout, has_finished, open_locked


class Journal:
    """One file per group that is running or waits to be trained on, with one line per finished attempt.

    The group id contains the group's index in the task order, which is the same in a resumed run. When a step's own
    file contains a group, `remove_groups` deletes the group's file here. Infrastructure failures are run again.

    Args:
        directory: directory of the files.
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
        """Lock the directory and record rollouts within the block.

        Raises:
            ConfigError: another process trains in this directory.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        lock = self._directory / ".lock"
        file = open_locked(lock)
        try:
            yield
        finally:
            await asyncio.shield(self._writer.start(lambda: None))  # waits for pending writes
            self._writer.close()
            lock.unlink(missing_ok=True)
            file.close()
            with contextlib.suppress(OSError):
                self._directory.rmdir()

    # --- the run's settings, until the first checkpoint has them ------------------------------------------------------

    def read_manifest(self) -> dict[str, Any] | None:
        """Return the last manifest; None if there is none."""
        try:
            value: dict[str, Any] = json.loads(self._manifest_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Save what the run was started with, as plain values. It serves until the first checkpoint."""
        replace_text(self._manifest_file, json.dumps(manifest))

    def remove_manifest(self) -> None:
        """Delete the manifest, because a checkpoint now contains it."""
        self._manifest_file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all files."""
        for path in self._directory.glob("*.json*"):
            path.unlink()

    # --- as the record of a batch -------------------------------------------------------------------------------------

    def finished(self, group: AttemptGroup, attempt: int) -> StoredRollout | None:
        """Return the stored rollout of an attempt; None if it has not finished.

        Raises:
            ConfigError: the task has changed since the attempt.
        """
        if group.group_id not in self._found:
            self._found[group.group_id] = self._read(self._file(group.group_id))
        found = self._found[group.group_id].pop(attempt, None)
        if attempt == group.attempts - 1:
            del self._found[group.group_id]
        if found is None or found.trajectory.task.id != group.task.id:
            return None  # with a curriculum, a run of another length may have another task at this index
        if found.trajectory.task.canonical_json != group.task.canonical_json:
            raise ConfigError(
                f"The rollouts in {self._directory} cannot be resumed: the task {group.task.id!r} has changed. "
                "Give changed tasks another id, or start a new run."
            )
        return found

    def append(self, group: AttemptGroup, trajectories: Sequence[Trajectory], *, scored: bool) -> asyncio.Future[None]:
        """Write trajectories of a group in the background. The last line of an attempt counts."""
        return self._writer.start(self._append, group.group_id, tuple(trajectories), scored)

    async def remove_groups(self, group_ids: Iterable[str]) -> None:
        """Delete the files of groups."""
        paths = [self._file(group_id) for group_id in group_ids]

        def remove() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        await self._writer.start(remove)

    # --- files --------------------------------------------------------------------------------------------------------

    def _file(self, group_id: str) -> Path:
        return self._directory / f"{group_id}.jsonl"

    def _read(self, path: Path) -> dict[int, StoredRollout]:
        """Return the finished attempts in a file, and remove an incomplete last line that a crash has left.

        Raises:
            ConfigError: a line is not a stored rollout.
        """
        found: dict[int, StoredRollout] = {}
        if not path.is_file():
            return found
        for number, line in recover_lines(path):
            try:
                value = json.loads(line)
                trajectory, scored = Trajectory.from_json(value), bool(value["scored"])
            except (ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"The run cannot be resumed: {path}, line {number} is not a stored rollout "
                    f"({describe_error(error)}). Remove that line; the rollout is then run again."
                ) from error
            found[trajectory.attempt] = StoredRollout(trajectory, scored)
        return {attempt: finished for attempt, finished in found.items() if has_finished(finished.trajectory)}

    def _append(self, group_id: str, trajectories: tuple[Trajectory, ...], scored: bool) -> None:
        lines = "".join(trajectory_json_line(trajectory, scored=scored) for trajectory in trajectories).encode("utf-8")
        try:
            with self._file(group_id).open("ab", buffering=0) as file:
                append_or_restore(file.fileno(), lines)
        except OSError as error:
            raise PrerequisiteError(
                f"The rollouts of the run cannot be saved in {self._directory}: {error.strerror}. Free some space, and "
                "continue with --resume (in Python: resume=True)."
            ) from error
