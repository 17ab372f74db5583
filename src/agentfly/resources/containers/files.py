"""Files: how files get into a sandbox and out of it, by commands that run there."""

from __future__ import annotations

import os
import posixpath
import re
import secrets
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from agentfly.errors import ResourceError, ToolError, UsageError
from agentfly.resources.containers.archive_bytes import ArchiveError, FileBytes
from agentfly.resources.containers.command import Command, Outcome, shell_word
from agentfly.resources.containers.packing import Piece, pieces
from agentfly.resources.containers.spec import INSIDE
from agentfly.resources.containers.tar_reader import TarReader
from agentfly.resources.containers.unpacking import TooLarge, Unpacker, UnpackLimits
from agentfly.resources.tree_removal import remove_tree
from agentfly.threads.cancel_token import CancelToken, on_cancellable_thread
from agentfly.threads.pool import on_thread

MAX_FILE = 64 * 2**20
_MAX_ERRORS = 64 * 1024
_FILE_TIMEOUT_S = 60.0
_OUR_SCRIPTS = re.compile(rf"^(?:{INSIDE}|/\S+/\d+/shell)/\d+\.(?:sh|cmd): (?:line \d+: )?", re.MULTILINE)
# "command -p" looks in the system's directories only, whatever the agent put into those before them
_PROGRAM = b"builtin command -p "


class Files:
    """The files of a sandbox. Paths that are not absolute are below its workdir."""

    def __init__(self, run: Callable[[Command, float], Awaitable[Outcome]], workdir: str) -> None:
        """Go by way of a sandbox's `run`."""
        self._run = run
        self._workdir = workdir

    async def read(self, path: str) -> bytes:
        """See `Container.read_file`."""
        where = self._quoted(path)
        head = _PROGRAM + b"head -c %d -- %s" % (MAX_FILE + 1, where)
        source = b"[[ -d %s ]] || %s || exit 1; [[ ! -d %s ]]" % (where, head, where)
        outcome = await self._do(source, None, 2 * (MAX_FILE + 1))
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be read: {_reason(outcome) or 'it is a directory'}")
        if outcome.stdout.total > MAX_FILE:
            raise ToolError(f"{path} is longer than {MAX_FILE} bytes, the most that can be read at once.")
        return outcome.stdout.kept

    async def write(self, path: str, content: bytes) -> None:
        """See `Container.write_file`."""
        where, parent = self._quoted(path), self._quoted(posixpath.dirname(path))
        source = b"{ [[ -d %s ]] || %s; } && " % (parent, _PROGRAM + b"mkdir -p -- %s" % parent)
        source += _PROGRAM + b"cat > %s" % where
        await self._write(path, source, content)

    async def upload(self, source: Path, path: str) -> None:
        """See `Container.upload`."""
        content = pieces(source)
        while (piece := await on_thread(_next, content)) is not None:
            await self._write(path, self._placing(path, piece), piece.content)

    async def download(self, path: str, target: Path, limits: UnpackLimits, limit_s: float) -> list[str]:
        """See `Container.download`."""
        where = self._quoted(path)
        kind = await self._do(b"if [[ -d %s ]]; then echo d; elif [[ -e %s ]]; then echo f; fi" % (where, where))
        if kind.stdout.kept == b"d\n":
            return await self._download_directory(path, target, limits, limit_s)
        if kind.stdout.kept != b"f\n":
            raise ToolError(f"{path} could not be copied: there is no such file or directory.")
        if await on_thread(target.is_dir):
            raise UsageError(f"download(): {target} is a directory, and {path} a file. Give the name of its copy.")
        source = _PROGRAM + b"head -c %d -- %s" % (limits.max_bytes + 1, where)
        draft = target.with_name(f".{secrets.token_hex(8)}.draft")
        try:
            await on_thread(target.parent.mkdir, parents=True, exist_ok=True)
            try:
                with await on_thread(draft.open, "xb") as file:
                    await self._pour(path, source, file, limits.max_bytes, limit_s)
                await on_thread(draft.replace, target)
            finally:
                await on_thread(draft.unlink, missing_ok=True)
        except OSError as error:
            raise _not_copied(path, target, error) from error
        return []

    async def _download_directory(self, path: str, target: Path, limits: UnpackLimits, limit_s: float) -> list[str]:
        if await on_thread(_taken, target):
            raise UsageError(f"download(): {target} is there already. Give a directory that is not, or is empty.")
        most = limits.max_length  # of the archive, which has more than the files
        source = _PROGRAM + b"tar -C %s -cf - . | " % self._quoted(path)
        source += _PROGRAM + b'head -c %d; exit "${PIPESTATUS[0]}"' % (most + 1)
        with tempfile.TemporaryFile() as file:
            await self._pour(path, source, file, most, limit_s)
            try:
                return await on_cancellable_thread(_unpack, limit_s, file, target, limits)
            except ArchiveError as error:
                raise _refused(path, error, error.limit if isinstance(error, TooLarge) else None) from error
            except OSError as error:
                raise _not_copied(path, target, error) from error

    async def _pour(self, path: str, source: bytes, file: BinaryIO, max_bytes: int, limit_s: float) -> None:
        spool = _Spool(file, max_bytes)
        command = Command(source, True, None, {}, None, _MAX_ERRORS, sink=spool.add)
        outcome = await self._run(command, limit_s)
        if spool.failure is not None:
            raise ResourceError(f"{path} could not be copied to this host: {spool.failure}") from spool.failure
        if spool.total > max_bytes:
            raise _refused(path, f"it holds more than {max_bytes} bytes", "max_bytes")
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be copied: {_reason(outcome, limit_s)}")
        file.seek(0)

    async def _write(self, path: str, source: bytes, content: bytes) -> None:
        outcome = await self._do(source, content)
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be written: {_reason(outcome)}")

    async def _do(self, source: bytes, stdin: bytes | None = None, max_output: int = _MAX_ERRORS) -> Outcome:
        return await self._run(Command(source, True, None, {}, stdin, max_output), _FILE_TIMEOUT_S)

    def _placing(self, path: str, piece: Piece) -> bytes:
        """The command that puts a piece of what is uploaded in its place."""
        if piece.file is None:
            where = self._quoted(path)
            tar = b"tar -C %s --no-same-owner --no-overwrite-dir -xpf -" % where
            return _PROGRAM + b"mkdir -p -- %s && " % where + _PROGRAM + tar
        where = self._quoted(posixpath.join(path, piece.file) if piece.file else path)
        if not piece.first:
            return _PROGRAM + b"cat >> %s" % where
        parent = self._quoted(posixpath.dirname(posixpath.join(path, piece.file) if piece.file else path))
        steps = (b"mkdir -p -- %s" % parent, b"cat > %s" % where, b"chmod %o -- %s" % (piece.mode, where))
        return b" && ".join(_PROGRAM + step for step in steps)

    def _quoted(self, path: str) -> bytes:
        """A path inside as a word of the shell. A name that is not UTF-8 is written as `os.fsdecode` does it."""
        shell_word(path, "The path")
        return os.fsencode(shlex.quote(posixpath.join(self._workdir, path)))


class _Spool:
    """Writes what comes out of a sandbox to a file, up to a limit. Called by readers of pipes, so it never raises."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.total = 0
        self.failure: OSError | None = None
        self._file = file
        self._limit = limit

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        if self.total > self._limit or self.failure is not None:
            return
        try:
            self._file.write(chunk)
        except OSError as error:
            self.failure = error


def _unpack(token: CancelToken, file: BinaryIO, target: Path, limits: UnpackLimits) -> list[str]:
    """Unpack what came out of a sandbox, all of it or nothing; what was left out."""
    made = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with Unpacker(target, limits, token, leaving_links=False) as unpacker:
            unpacker.add(TarReader(FileBytes(file, token), max_length=limits.max_length))
            unpacker.finish()
            return unpacker.left_out
    except BaseException:
        for entry in [target] if made else list(target.iterdir()):
            remove_tree(entry)
        raise


def _taken(target: Path) -> bool:
    return os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir()))


def _next(content: Iterator[Piece]) -> Piece | None:
    """The next piece of what is uploaded; None after the last one."""
    try:
        return next(content, None)
    except FileNotFoundError as error:
        raise UsageError(f"upload(): {error.filename} is not there on this host.") from error
    except OSError as error:
        raise UsageError(f"upload(): what is to be copied cannot be read on this host: {error}") from error


def _not_copied(path: str, target: Path, error: OSError) -> ResourceError:
    return ResourceError(f"{path} could not be copied to {target} on this host: {error}")


def _refused(path: str, why: object, limit: str | None = None) -> ToolError:
    cure = f" {path} can be copied in part, or download({limit}=…) allows more." if limit else ""
    return ToolError(f"{path} could not be copied: {why}.{cure}")


def _reason(outcome: Outcome, limit_s: float = _FILE_TIMEOUT_S) -> str:
    if outcome.timed_out:
        return f"it took longer than {limit_s:g} s"
    return _OUR_SCRIPTS.sub("", outcome.stderr.text()).strip()
