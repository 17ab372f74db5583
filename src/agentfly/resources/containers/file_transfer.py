"""FileTransfer: files into and out of a sandbox, by commands that run there and uploads split into chunks."""

from __future__ import annotations

import io
import os
import posixpath
import re
import secrets
import shlex
import stat
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentfly.core.errors import ResourceError, ToolError, UsageError
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.threads.run import CancelToken, run_in_cancellable_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.containers.archives.byte_readers import ArchiveError, FileSlice
from agentfly.resources.containers.archives.tar_reader import TarReader
from agentfly.resources.containers.archives.unpacker import ArchiveTooLarge, Unpacker, UnpackLimits
from agentfly.resources.containers.command import Command, CommandOutcome, encode_shell_word
from agentfly.resources.containers.spec import SHELL_MOUNT

_PIECE = 4 * 2**20  # bytes


@dataclass(frozen=True)
class UploadChunk:
    """Something to be put down inside.

    Args:
        content: a tar of small things, or a part of a file.
        file: the file that it is a part of, by its path below the copy; empty for the copy itself; None for a tar.
        starts_file: whether it is the first part of the file.
        mode: permissions of the file.
    """

    content: bytes
    file: str | None = None
    starts_file: bool = True
    mode: int = 0


def pieces(source: Path) -> Iterator[UploadChunk]:
    """Take a file or a directory apart. Devices, pipes and sockets in it are left out.

    Raises:
        OSError: something of it cannot be read, or it is neither.
    """
    if source.is_dir():
        yield from _directory_chunks(source)
    elif stat.S_ISREG(source.stat().st_mode):
        yield from _file_chunks(source, "")
    else:
        raise OSError(f"{source} is neither a file nor a directory")


def _directory_chunks(source: Path) -> Iterator[UploadChunk]:
    tar = _TarChunk()
    ahead = [""]
    while ahead:
        below = ahead.pop()
        folders: list[str] = []
        with os.scandir(source / below) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            inside = f"{below}/{entry.name}" if below else entry.name
            about = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                folders.append(inside)
            if stat.S_ISREG(about.st_mode) and about.st_size > _PIECE:
                yield tar.piece()  # with the directory that it is in
                yield from _file_chunks(Path(entry.path), inside)
                tar = _TarChunk()
            elif tar.add(Path(entry.path), inside, about.st_mode) > _PIECE:
                yield tar.piece()
                tar = _TarChunk()
        ahead += reversed(folders)
    yield tar.piece()


def _file_chunks(path: Path, inside: str) -> Iterator[UploadChunk]:
    first = True
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
        while (content := file.read(_PIECE)) or first:
            yield UploadChunk(content, inside, first, mode)
            first = False


class _TarChunk:
    def __init__(self) -> None:
        self._content = io.BytesIO()
        self._archive = tarfile.open(fileobj=self._content, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def add(self, path: Path, inside: str, mode: int) -> int:
        """Add a file without what is below it, but no socket, device or pipe; the size that the tar has then."""
        if stat.S_ISREG(mode):
            # it may have become something else: a link is not followed, and a pipe not waited for
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                self._put(self._archive.gettarinfo(arcname=inside, fileobj=file), file)
        elif stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
            self._put(self._archive.gettarinfo(path, inside))
        return self._content.tell()

    def _put(self, member: tarfile.TarInfo | None, file: BinaryIO | None = None) -> None:
        if member is None or member.isdev():
            return
        if member.isdir():
            member.mode |= stat.S_IRWXU  # more is to be put into it
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        self._archive.addfile(member, file if member.isreg() else None)

    def piece(self) -> UploadChunk:
        self._archive.close()
        return UploadChunk(self._content.getvalue())


MAX_FILE = 64 * 2**20
_MAX_ERRORS = 64 * 1024
_FILE_TIMEOUT_S = 60.0
_INTERNAL_SCRIPTS = re.compile(rf"^(?:{SHELL_MOUNT}|/\S+/\d+/shell)/\d+\.(?:sh|cmd): (?:line \d+: )?", re.MULTILINE)
# "command -p" looks in the system's directories only, whatever the agent put into those before them
_PROGRAM = b"builtin command -p "


class FileTransfer:
    """The files of a sandbox. Paths that are not absolute are below its workdir."""

    def __init__(self, run: Callable[[Command, float], Awaitable[CommandOutcome]], workdir: str) -> None:
        """Go by way of a sandbox's `run`."""
        self._run = run
        self._workdir = workdir

    async def read(self, path: str) -> bytes:
        """See `Container.read_file`."""
        where = self._quoted_path(path)
        head = _PROGRAM + b"head -c %d -- %s" % (MAX_FILE + 1, where)
        source = b"[[ -d %s ]] || %s || exit 1; [[ ! -d %s ]]" % (where, head, where)
        outcome = await self._run_script(source, None, 2 * (MAX_FILE + 1))
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be read: {_failure_reason(outcome) or 'it is a directory'}")
        if outcome.stdout.total > MAX_FILE:
            raise ToolError(f"{path} is longer than {MAX_FILE} bytes, the most that can be read at once.")
        return outcome.stdout.data

    async def write(self, path: str, content: bytes) -> None:
        """See `Container.write_file`."""
        where, parent = self._quoted_path(path), self._quoted_path(posixpath.dirname(path))
        source = b"{ [[ -d %s ]] || %s; } && " % (parent, _PROGRAM + b"mkdir -p -- %s" % parent)
        source += _PROGRAM + b"cat > %s" % where
        await self._write(path, source, content)

    async def upload(self, source: Path, path: str) -> None:
        """See `Container.upload`."""
        content = pieces(source)
        while (piece := await run_in_thread(_next_chunk, content)) is not None:
            await self._write(path, self._write_chunk_script(path, piece), piece.content)

    async def download(self, path: str, target: Path, limits: UnpackLimits, limit_s: float) -> list[str]:
        """See `Container.download`."""
        where = self._quoted_path(path)
        kind = await self._run_script(
            b"if [[ -d %s ]]; then echo d; elif [[ -e %s ]]; then echo f; fi" % (where, where)
        )
        if kind.stdout.data == b"d\n":
            return await self._download_directory(path, target, limits, limit_s)
        if kind.stdout.data != b"f\n":
            raise ToolError(f"{path} could not be copied: there is no such file or directory.")
        if await run_in_thread(target.is_dir):
            raise UsageError(f"download(): {target} is a directory, and {path} a file. Give the name of its copy.")
        source = _PROGRAM + b"head -c %d -- %s" % (limits.max_bytes + 1, where)
        draft = target.with_name(f".{secrets.token_hex(8)}.draft")
        try:
            await run_in_thread(target.parent.mkdir, parents=True, exist_ok=True)
            try:
                with await run_in_thread(draft.open, "xb") as file:
                    await self._stream_to_file(path, source, file, limits.max_bytes, limit_s)
                await run_in_thread(draft.replace, target)
            finally:
                await run_in_thread(draft.unlink, missing_ok=True)
        except OSError as error:
            raise _host_write_error(path, target, error) from error
        return []

    async def _download_directory(self, path: str, target: Path, limits: UnpackLimits, limit_s: float) -> list[str]:
        if await run_in_thread(_is_occupied, target):
            raise UsageError(f"download(): {target} is there already. Give a directory that is not, or is empty.")
        most = limits.max_length  # of the archive, which has more than the files
        source = _PROGRAM + b"tar -C %s -cf - . | " % self._quoted_path(path)
        source += _PROGRAM + b'head -c %d; exit "${PIPESTATUS[0]}"' % (most + 1)
        with tempfile.TemporaryFile() as file:
            await self._stream_to_file(path, source, file, most, limit_s)
            try:
                return await run_in_cancellable_thread(_unpack, limit_s, file, target, limits)
            except ArchiveError as error:
                raise _download_error(
                    path, error, error.limit if isinstance(error, ArchiveTooLarge) else None
                ) from error
            except OSError as error:
                raise _host_write_error(path, target, error) from error

    async def _stream_to_file(self, path: str, source: bytes, file: BinaryIO, max_bytes: int, limit_s: float) -> None:
        spool = _BoundedFileSink(file, max_bytes)
        command = Command(source, True, None, {}, None, _MAX_ERRORS, stdout_sink=spool.add)
        outcome = await self._run(command, limit_s)
        if spool.failure is not None:
            raise ResourceError(f"{path} could not be copied to this host: {spool.failure}") from spool.failure
        if spool.total > max_bytes:
            raise _download_error(path, f"it holds more than {max_bytes} bytes", "max_bytes")
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be copied: {_failure_reason(outcome, limit_s)}")
        file.seek(0)

    async def _write(self, path: str, source: bytes, content: bytes) -> None:
        outcome = await self._run_script(source, content)
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be written: {_failure_reason(outcome)}")

    async def _run_script(
        self, source: bytes, stdin: bytes | None = None, max_output: int = _MAX_ERRORS
    ) -> CommandOutcome:
        return await self._run(Command(source, True, None, {}, stdin, max_output), _FILE_TIMEOUT_S)

    def _write_chunk_script(self, path: str, piece: UploadChunk) -> bytes:
        """The command that writes a chunk of an upload to its file."""
        if piece.file is None:
            where = self._quoted_path(path)
            tar = b"tar -C %s --no-same-owner --no-overwrite-dir -xpf -" % where
            return _PROGRAM + b"mkdir -p -- %s && " % where + _PROGRAM + tar
        where = self._quoted_path(posixpath.join(path, piece.file) if piece.file else path)
        if not piece.starts_file:
            return _PROGRAM + b"cat >> %s" % where
        parent = self._quoted_path(posixpath.dirname(posixpath.join(path, piece.file) if piece.file else path))
        steps = (b"mkdir -p -- %s" % parent, b"cat > %s" % where, b"chmod %o -- %s" % (piece.mode, where))
        return b" && ".join(_PROGRAM + step for step in steps)

    def _quoted_path(self, path: str) -> bytes:
        """A path inside as a word of the shell. A name that is not UTF-8 is encoded as `os.fsdecode` decoded it."""
        encode_shell_word(path, "The path")
        return os.fsencode(shlex.quote(posixpath.join(self._workdir, path)))


class _BoundedFileSink:
    """Writes output of a sandbox to a file, up to a limit. `add` never raises, because pipe readers call it."""

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
    """Unpack an archive from a sandbox, completely or not at all; return the skipped entries."""
    made = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with Unpacker(target, limits, token, leaving_links=False) as unpacker:
            unpacker.add(TarReader(FileSlice(file, token), max_length=limits.max_length))
            unpacker.remove_escaping_links()
            return unpacker.skipped
    except BaseException:
        for entry in [target] if made else list(target.iterdir()):
            remove_tree(entry)
        raise


def _is_occupied(target: Path) -> bool:
    return os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir()))


def _next_chunk(content: Iterator[UploadChunk]) -> UploadChunk | None:
    """The next chunk of an upload; None after the last one."""
    try:
        return next(content, None)
    except FileNotFoundError as error:
        raise UsageError(f"upload(): {error.filename} is not there on this host.") from error
    except OSError as error:
        raise UsageError(f"upload(): what is to be copied cannot be read on this host: {error}") from error


def _host_write_error(path: str, target: Path, error: OSError) -> ResourceError:
    return ResourceError(f"{path} could not be copied to {target} on this host: {error}")


def _download_error(path: str, why: object, limit: str | None = None) -> ToolError:
    cure = f" {path} can be copied in part, or download({limit}=…) allows more." if limit else ""
    return ToolError(f"{path} could not be copied: {why}.{cure}")


def _failure_reason(outcome: CommandOutcome, limit_s: float = _FILE_TIMEOUT_S) -> str:
    if outcome.timed_out:
        return f"it took longer than {limit_s:g} s"
    return _INTERNAL_SCRIPTS.sub("", outcome.stderr.text()).strip()
