"""The supervisor of a program: a small process that copies the program's output to a log and leaves nothing behind.

It is a subreaper: descendants of the program become its children when their parents end, even if they have left the
group or session. It kills all of them and exits when the program ends, when it is told to stop, or when the process
that started it is gone.

It holds one end of the control socket. The owner first sends a `ProgramSpec`, one line of JSON. Further lines, each a
number of seconds, ask the program to end: it gets SIGTERM and that much time; the earliest deadline counts.
End-of-file means: kill everything now. Before it exits, the supervisor writes an exit report in JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentfly.resources.process.child import (
    become_subreaper,
    child_wakeup_fd,
    kill_descendants,
    reap_child,
    reset_signals,
    set_parent_death_signal,
)

_LEAST_LINE = 16  # characters of a line of a secret that is taken for one too


class RotatingLog:
    """Writes a log of which the end is kept: two files that take turns, each of at most half the size.

    Args:
        path: the file; what it held before it was full is beside it.
        limit: bytes that both files may take together.
        secrets: texts that are not written, however they come in parts. Of one that has several lines, such as a
            private key, no line is written.
    """

    def __init__(self, path: Path, limit: int, secrets: Sequence[str] = ()) -> None:
        self._path = path
        self._limit = limit // 2
        self._secrets = sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True)
        self._file = path.open("ab", buffering=0)
        self._held = b""

    def write(self, data: bytes) -> None:
        """Add what the program wrote. The beginning of a secret is held back until it shows whether it is one."""
        data = self._held + data
        for secret in self._secrets:
            data = data.replace(secret, b"[secret]")
        end = min((_unfinished(data, secret) for secret in self._secrets), default=len(data))
        self._held = data[end:]
        self._write_redacted(data[:end])

    def close(self) -> None:
        """Write what has been held back, and close the file."""
        self._write_redacted(self._held)
        self._held = b""
        self._file.close()

    def _write_redacted(self, data: bytes) -> None:
        while data:
            room = self._limit - self._file.tell()
            if room <= 0:
                self._file.close()
                self._path.replace(_rotated(self._path))
                self._file = self._path.open("ab", buffering=0)
                room = self._limit
            with contextlib.suppress(OSError):  # a full disk costs the log, not the program
                self._file.write(data[:room])
            data = data[room:]


def _forms(secret: str) -> set[bytes]:
    """A secret, and its lines, which a program may write indented or with other ends of lines."""
    lines = (line.strip() for line in secret.splitlines())
    forms = {secret.strip(), *(line for line in lines if len(line) >= _LEAST_LINE)}
    return {form.encode() for form in forms if form}


def _unfinished(data: bytes, secret: bytes) -> int:
    """Where, at the end of some data, a secret begins of which the rest is to come; the data's length if nowhere."""
    at = max(0, len(data) - len(secret) + 1)
    while (at := data.find(secret[:1], at)) >= 0:
        if secret.startswith(data[at:]):
            return at
        at += 1
    return len(data)


def log_tail(path: Path, size: int) -> str:
    """The last ``size`` bytes of a log, from the beginning of a line; empty if there is none."""
    kept = b""
    for part in (path, _rotated(path)):
        with contextlib.suppress(OSError):
            kept = part.read_bytes() + kept
        if len(kept) > size:
            kept = kept[-size:].partition(b"\n")[2]
            break
    return kept.decode(errors="replace").strip()


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


DIRECTORY_VARIABLE = "AGENTFLY_KEPT_IN"
"""The environment variable by which a program, and what it starts, is known to belong to a directory."""


@dataclass(frozen=True)
class ProgramSpec:
    """A program to start.

    Attributes:
        command: its command line.
        env: all of its environment.
        directory: a directory that is its alone; it marks whatever the program starts.
        log: file that its output goes to, or what it says beside ``stdout``.
        log_bytes: how much of the end of that is kept.
        secrets: what must not be in the log.
        cwd: the directory it runs in; empty for ``directory``.
        stdin: descriptor of what it reads; None for nothing.
        stdout: descriptor of what it writes to; None for the log.
        inherited: further descriptors that it gets, such as a socket to serve; they have the same numbers there.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    directory: str
    log: str
    log_bytes: int
    secrets: Sequence[str]
    cwd: str = ""
    stdin: int | None = None
    stdout: int | None = None
    inherited: Sequence[int] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that the program gets of this process's, each once."""
        given = [*self.inherited, *(one for one in (self.stdin, self.stdout) if one is not None)]
        return tuple(dict.fromkeys(given))

    def to_json_line(self) -> bytes:
        """The job as the keeper gets it."""
        return json.dumps(asdict(self)).encode() + b"\n"


def run_program(life_fd: int, parent: int) -> None:
    """Keep one program.

    Args:
        life_fd: descriptor of the life line.
        parent: id of the process that the program belongs to.
    """
    become_subreaper()
    with socket.socket(fileno=life_fd) as life:
        words: dict[str, object]
        try:
            words = {"exit": _supervise(life, parent)}
        except OSError as error:
            words = {"failed": str(error)}
        finally:
            kill_descendants()
        with contextlib.suppress(OSError):
            life.sendall(json.dumps(words).encode())
    os._exit(0)  # there is nothing to tidy, and whoever waits for the end waits for this


def _supervise(life: socket.socket, parent: int) -> int | None:
    """Start the program and see it to its end. Its exit status; None if it is to end, or before it was started."""
    line = b""
    while b"\n" not in line:
        if not (read := life.recv(1 << 16)):
            return None
        line += read
    line, _, word = line.partition(b"\n")
    if word:
        return None  # it is to end before it has begun
    job = ProgramSpec(**json.loads(line))
    log = RotatingLog(Path(job.log), job.log_bytes, job.secrets)
    reading, writing = os.pipe()
    program = subprocess.Popen(
        job.command,
        env={**job.env, DIRECTORY_VARIABLE: job.directory},
        cwd=job.cwd or job.directory,
        stdin=subprocess.DEVNULL if job.stdin is None else job.stdin,
        stdout=writing if job.stdout is None else job.stdout,
        stderr=writing,
        pass_fds=job.inherited,
        preexec_fn=_prepare_child,  # noqa: PLW1509  (the keeper has one thread)
    )
    for ours in (writing, *job.descriptors):
        os.close(ours)
    os.set_blocking(reading, False)
    try:
        return _wait_for_end(program.pid, life, parent, reading, log)
    finally:
        kill_descendants()
        while _copy_output(reading, log):
            pass
        log.close()


def _prepare_child() -> None:
    """What the program's process does before it becomes the program."""
    reset_signals()
    set_parent_death_signal()


def _wait_for_end(program: int, life: socket.socket, parent: int, output: int, log: RotatingLog) -> int | None:
    woken = child_wakeup_fd()
    told_to_end: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    watched = [life.fileno(), woken, output]
    deadline, heard = float("inf"), b""
    while not told_to_end and os.getppid() == parent and time.monotonic() < deadline:
        while (ended := reap_child()) is not None:
            pid, status = ended
            if pid == program:
                return status
        # The life line may be held open by a fork of the dead parent, hence the look at the parent every second.
        readable, _, _ = select.select(watched, [], [], max(0.0, min(1.0, deadline - time.monotonic())))
        if woken in readable:
            os.read(woken, 4096)
        if output in readable and not _copy_output(output, log):
            watched.remove(output)
        if life.fileno() in readable:
            if not (read := life.recv(64)):
                return None
            *words, heard = (heard + read).split(b"\n")
            for word in words:
                deadline = min(deadline, time.monotonic() + float(word))
                os.kill(program, signal.SIGTERM)
    return None


def _copy_output(output: int, log: RotatingLog) -> bool:
    """Write down some of what the program has written; False at its end, or when there is nothing just now."""
    try:
        data = os.read(output, 1 << 16)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)
