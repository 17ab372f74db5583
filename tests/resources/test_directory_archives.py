"""Directory archives: a packed directory unpacks to an equal one."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.resources.containers import file_transfer
from agentfly.resources.containers.file_transfer import pieces
from tests.support.archives import LIMITS, unpack


def put_together(source: Path, target: Path) -> None:
    """What a sandbox does with the pieces."""
    target.mkdir()
    for piece in pieces(source):
        if piece.file is None:
            unpack(piece.content, target, LIMITS)
        else:
            (target / piece.file).parent.mkdir(parents=True, exist_ok=True)
            with (target / piece.file).open("wb" if piece.starts_file else "ab") as file:
                file.write(piece.content)
            (target / piece.file).chmod(piece.mode)


def test_a_directory_comes_whole_in_pieces_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_transfer, "_PIECE", 30_000)
    source = tmp_path / "source"
    (source / "a" / "b" / "empty").mkdir(parents=True)
    for number in range(12):
        (source / "a" / f"f{number}").write_bytes(os.urandom(number * 9_000))
    (source / "a" / "b" / "program").write_text("#!")
    (source / "a" / "b" / "program").chmod(0o755)
    (source / "link").symlink_to("a/b/program")
    os.link(source / "a" / "f1", source / "a" / "same")
    put_together(source, tmp_path / "target")
    subprocess.run(["diff", "-r", "--no-dereference", source, tmp_path / "target"], check=True)
    assert (tmp_path / "target" / "a" / "b" / "program").stat().st_mode & 0o777 == 0o755
    assert max(len(piece.content) for piece in pieces(source)) < 100_000


def test_a_directory_deeper_than_the_stack_is_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "/".join("d" * 300)).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        assert sum(1 for _ in pieces(tmp_path)) == 1
    finally:
        sys.setrecursionlimit(limit)


def test_pipes_and_sockets_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    (source / "file").touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(source / "socket"))
        put_together(source, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]


@pytest.mark.parametrize("become", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")], ids=["a pipe", "a link"])
def test_a_file_that_becomes_something_else_meanwhile_is_neither_followed_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, become: Callable[[Path], None]
) -> None:
    (tmp_path / "file").touch()
    add = file_transfer._TarChunk.add

    def late(tar: file_transfer._TarChunk, path: Path, inside: str, mode: int) -> int:
        path.unlink()
        become(path)
        return add(tar, path, inside, mode)

    monkeypatch.setattr(file_transfer._TarChunk, "add", late)
    try:
        content = b"".join(piece.content for piece in pieces(tmp_path))
    except OSError:
        return
    assert b"root:" not in content
