"""A shared file is read completely or not at all, also if writers are killed or remove it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
from pathlib import Path

import pytest

from agentfly.core.shared_file import SLOT_BYTES, FileLocked, lock_file


@pytest.mark.parametrize("writings", [1, 2, 3])
def test_a_writing_that_was_cut_leaves_what_was_there_before(tmp_path: Path, writings: int) -> None:
    path = tmp_path / "shared"
    for number in range(writings):
        with lock_file(path) as file:
            file.write(f"whole {number}".encode())
    before = path.read_bytes()
    with lock_file(path) as file:
        file.write(b"cut" * 5000)
    whole = path.read_bytes()
    (start,) = [place for place in (0, SLOT_BYTES) if before[place : place + 8] != whole[place : place + 8]]
    with path.open("r+b") as spoil:  # as if its end had never been reached
        spoil.seek(start + 6000)
        spoil.write(bytes(9000))
    with lock_file(path) as file:
        assert file.read() == f"whole {writings - 1}".encode()


COUNT = """
import pathlib, sys, time
from agentfly.core.shared_file import FileLocked, lock_file

left = int(sys.argv[2])
while left:
    try:
        with lock_file(pathlib.Path(sys.argv[1])) as file:
            file.write(b"%d" % (int(file.read() or 0) + 1) + b" " * 20000)
        left -= 1
    except FileLocked:
        time.sleep(0.0001)
"""


@pytest.mark.slow
async def test_nothing_is_lost_between_processes_nor_spoilt_by_one_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    run = (sys.executable, "-c", COUNT, str(path))
    counting = [await asyncio.create_subprocess_exec(*run, "400") for _ in range(2)]
    for _ in range(8):
        killed = await asyncio.create_subprocess_exec(*run, "1000000")
        await asyncio.sleep(0.15)
        killed.kill()
        await killed.wait()
        while True:
            with contextlib.suppress(FileLocked), lock_file(path) as file:
                assert file.read().rstrip().isdigit() or not file.read()
                break
    assert [await one.wait() for one in counting] == [0, 0]
    with lock_file(path) as file:
        before = int(file.read())
    assert before >= 800
    for one in [await asyncio.create_subprocess_exec(*run, "300") for _ in range(3)]:
        assert await one.wait() == 0
    with lock_file(path) as file:
        assert int(file.read()) == before + 900


def test_no_more_than_fits_is_written(tmp_path: Path) -> None:
    with lock_file(tmp_path / "shared") as file, pytest.raises(OSError, match="more than"):
        file.write(b"x" * SLOT_BYTES)


def test_a_file_that_is_removed_while_it_is_waited_for_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "traffic"
    lock = fcntl.flock

    def removed_meanwhile(file: int, how: int) -> None:
        path.unlink(missing_ok=True)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with pytest.raises(FileLocked), lock_file(path):
        pass
