"""Files are replaced as a whole, and locks are held by one process at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.core.errors import PrerequisiteError
from agentfly.core.files import (
    LOCK_POLL_S,
    append_or_restore,
    async_file_lock,
    atomic_write,
    file_lock,
    is_same_file,
    read_json_lines,
    recover_lines,
    replace_text,
    try_lock,
)


def test_a_file_is_replaced_as_a_whole_with_the_permissions_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path, mode=0o600) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_a_block_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail_halfway() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail_halfway()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_collide_and_the_last_replacement_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as first:
        first.write(b"first, which is longer")
        with atomic_write(path) as second:
            second.write(b"second")
        assert path.read_text() == "second"
    assert path.read_text() == "first, which is longer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_draft_that_a_crash_left_is_removed_by_a_later_write_of_the_same_file_alone(tmp_path: Path) -> None:
    path, stale, recent, other = (
        tmp_path / name for name in ("a[1]", ".a[1].0a.unfinished", ".a[1].0b.unfinished", ".a1.0c.unfinished")
    )
    for draft in (stale, recent, other):
        draft.touch()
    for draft in (stale, other):
        os.utime(draft, (0, 0))
    replace_text(path, "new")
    assert sorted(tmp_path.iterdir()) == sorted([path, recent, other])


def test_a_full_disk_is_reported_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_text(path, "old")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(PrerequisiteError, match="It is as it was"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


_HOLDER = """
import sys
from pathlib import Path
from agentfly.core.files import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_waits_for_the_death_of_the_process_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "below" / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        attempts = [1, 2, 3]
        with pytest.raises(IndexError), file_lock(path, check=attempts.pop):
            pass
        holder.kill()
    with file_lock(path):
        pass


async def test_an_async_lock_waits_without_holding_up_the_loop_and_can_be_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path):

        async def wait() -> None:
            async with async_file_lock(path):
                pass

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(2 * LOCK_POLL_S)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
    await wait()


def test_a_file_that_was_replaced_before_it_was_locked_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert try_lock(descriptor)
        assert is_same_file(descriptor, path)
        replace_text(path, "new")
        assert not is_same_file(descriptor, path)
        path.unlink()
        assert not is_same_file(descriptor, path)
    finally:
        os.close(descriptor)


def test_an_append_that_fails_halfway_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"first\n")
    write, calls = os.write, iter([True, False])

    def half(descriptor: int, data: bytes) -> int:
        if next(calls):
            return write(descriptor, bytes(data)[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with path.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        append_or_restore(file.fileno(), b"second\n")
    assert path.read_bytes() == b"first\n"


def test_an_append_in_small_pieces_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:2]))
    path = tmp_path / "lines.jsonl"
    with path.open("ab", buffering=0) as file:
        append_or_restore(file.fileno(), b"a whole line\n")
    assert path.read_bytes() == b"a whole line\n"


def test_recovered_lines_are_whole_and_a_last_one_that_was_cut_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n{"c"')
    assert list(recover_lines(path)) == [(1, b'{"a": 1}\n'), (2, b'{"b": 2}\n')]
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'


def test_lines_that_were_not_read_to_the_end_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"bad\ngood\ncut")
    for _ in recover_lines(path):
        break
    assert path.read_bytes() == b"bad\ngood\ncut"


def test_a_durable_replacement_puts_its_name_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with atomic_write(tmp_path / "durable") as file:
        file.write(b"x")
    with atomic_write(tmp_path / "quick", durable=False) as file:
        file.write(b"x")
    assert synced == ["file", "directory"]


def test_a_line_that_is_nested_too_deeply_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b": ' + "[" * 100_000 + '\n{"c": 2}\n')
    assert read_json_lines(path) == [{"a": 1}, {"c": 2}]
