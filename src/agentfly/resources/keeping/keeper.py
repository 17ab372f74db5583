"""The keeper: the small process between this one and a program, which drains its output and leaves nothing behind.

Whatever the program starts, also what leaves its group or session, comes to the keeper when its parent ends. When the
program ends, when the keeper is told to end, or when the process that started the keeper is gone, however it went, the
keeper kills all of it and ends.

The keeper holds one end of the life line, a socket. Through it come the job, one line of JSON, and later perhaps lines
with a number of seconds: the program is asked to end (SIGTERM) and has as long for it. The earliest end that was said
counts. End-of-file says that everything must
end at once. What the keeper writes into it at its own end says how the program ended.
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

from agentfly.resources.descendants import (
    adopt_descendants,
    die_with_parent,
    end_descendants,
    reap_one,
    reset_signals,
    wakeups,
)
from agentfly.resources.keeping.log import Log

MARK = "AGENTFLY_KEPT_IN"
"""The environment variable by which a program, and what it starts, is known to belong to a directory."""


@dataclass(frozen=True)
class Job:
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

    def line(self) -> bytes:
        """The job as the keeper gets it."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main(life_fd: int, parent: int) -> None:
    """Keep one program.

    Args:
        life_fd: descriptor of the life line.
        parent: id of the process that the program belongs to.
    """
    adopt_descendants()
    with socket.socket(fileno=life_fd) as life:
        words: dict[str, object]
        try:
            words = {"exit": _keep(life, parent)}
        except OSError as error:
            words = {"failed": str(error)}
        finally:
            end_descendants()
        with contextlib.suppress(OSError):
            life.sendall(json.dumps(words).encode())
    os._exit(0)  # there is nothing to tidy, and whoever waits for the end waits for this


def _keep(life: socket.socket, parent: int) -> int | None:
    """Start the program and see it to its end. Its exit status; None if it is to end, or before it was started."""
    line = b""
    while b"\n" not in line:
        if not (read := life.recv(1 << 16)):
            return None
        line += read
    line, _, word = line.partition(b"\n")
    if word:
        return None  # it is to end before it has begun
    job = Job(**json.loads(line))
    log = Log(Path(job.log), job.log_bytes, job.secrets)
    reading, writing = os.pipe()
    program = subprocess.Popen(
        job.command,
        env={**job.env, MARK: job.directory},
        cwd=job.cwd or job.directory,
        stdin=subprocess.DEVNULL if job.stdin is None else job.stdin,
        stdout=writing if job.stdout is None else job.stdout,
        stderr=writing,
        pass_fds=job.inherited,
        preexec_fn=_before_it,  # noqa: PLW1509  (the keeper has one thread)
    )
    for ours in (writing, *job.descriptors):
        os.close(ours)
    os.set_blocking(reading, False)
    try:
        return _watch(program.pid, life, parent, reading, log)
    finally:
        end_descendants()
        while _drain(reading, log):
            pass
        log.close()


def _before_it() -> None:
    """What the program's process does before it becomes the program."""
    reset_signals()
    die_with_parent()


def _watch(program: int, life: socket.socket, parent: int, output: int, log: Log) -> int | None:
    woken = wakeups()
    told_to_end: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    watched = [life.fileno(), woken, output]
    deadline, heard = float("inf"), b""
    while not told_to_end and os.getppid() == parent and time.monotonic() < deadline:
        while (ended := reap_one()) is not None:
            pid, status = ended
            if pid == program:
                return status
        # The life line may be held open by a fork of the dead parent, hence the look at the parent every second.
        readable, _, _ = select.select(watched, [], [], max(0.0, min(1.0, deadline - time.monotonic())))
        if woken in readable:
            os.read(woken, 4096)
        if output in readable and not _drain(output, log):
            watched.remove(output)
        if life.fileno() in readable:
            if not (read := life.recv(64)):
                return None
            *words, heard = (heard + read).split(b"\n")
            for word in words:
                deadline = min(deadline, time.monotonic() + float(word))
                os.kill(program, signal.SIGTERM)
    return None


def _drain(output: int, log: Log) -> bool:
    """Write down some of what the program has written; False at its end, or when there is nothing just now."""
    try:
        data = os.read(output, 1 << 16)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)
