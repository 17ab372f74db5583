"""The supervisor of a program: a small process that copies the program's output to a log and leaves nothing behind.

It is a subreaper: descendants of the program become its children when their parents end, even if they have left the
group or session. It kills all of them and exits when the program ends, when it is asked to stop, or when the process
that started it is gone.

It holds one end of the control socket. The owner first sends a `ProgramSpec`, one line of JSON. Further lines, each a
number of seconds, ask the program to end: it gets SIGTERM and that much time; the earliest deadline counts.
End-of-file means that everything is killed now. Before it exits, the supervisor writes an exit report in JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentfly.resources.process.child import (
    ChildWatch,
    become_subreaper,
    kill_descendants,
    reset_signals,
    set_parent_death_signal,
)

_MIN_LINE_CHARS = 16  # a shorter line of a secret is not redacted by itself


class RotatingLog:
    """A log of bounded size without secrets. It alternates between two files, each of at most half the size.

    Args:
        path: the current file; the previous one is beside it.
        limit: maximum number of bytes of both files together.
        secrets: texts that are redacted, even if they arrive in parts. Of a secret with several lines, such as a
            private key, each line is redacted.
    """

    def __init__(self, path: Path, limit: int, secrets: Sequence[str] = ()) -> None:
        self._path = path
        self._limit = limit // 2
        self._secrets = sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True)
        self._file = path.open("ab", buffering=0)
        self._held = b""

    def write(self, data: bytes) -> None:
        """Append output of the program. A possible beginning of a secret is held back until the rest arrives."""
        data = self._held + data
        for secret in self._secrets:
            data = data.replace(secret, b"[secret]")
        end = min((_unfinished(data, secret) for secret in self._secrets), default=len(data))
        self._held = data[end:]
        self._write_redacted(data[:end])

    def close(self) -> None:
        """Write the data held back, and close the file."""
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
            with contextlib.suppress(OSError):  # a full disk loses log lines, but does not stop the program
                self._file.write(data[:room])
            data = data[room:]


def _forms(secret: str) -> set[bytes]:
    """The secret and its lines, which a program may write indented or with other line endings."""
    lines = (line.strip() for line in secret.splitlines())
    forms = {secret.strip(), *(line for line in lines if len(line) >= _MIN_LINE_CHARS)}
    return {form.encode() for form in forms if form}


def _unfinished(data: bytes, secret: bytes) -> int:
    """The position at the end of the data where a partial secret begins; the length of the data if there is none."""
    at = max(0, len(data) - len(secret) + 1)
    while (at := data.find(secret[:1], at)) >= 0:
        if secret.startswith(data[at:]):
            return at
        at += 1
    return len(data)


def log_tail(path: Path, size: int) -> str:
    """The last ``size`` bytes of a log, from the start of a line; empty if there is no log."""
    tail = b""
    for part in (path, _rotated(path)):
        with contextlib.suppress(OSError):
            tail = part.read_bytes() + tail
        if len(tail) > size:
            tail = tail[-size:].partition(b"\n")[2]
            break
    return tail.decode(errors="replace").strip()


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


DIRECTORY_VARIABLE = "AGENTFLY_SUPERVISED_IN"
"""The environment variable that ties a program and its descendants to a directory."""


@dataclass(frozen=True)
class ProgramSpec:
    """A program to start.

    Attributes:
        command: its command line.
        env: all of its environment.
        directory: its private directory; it marks all processes that the program starts.
        log: the file for its stderr, and for its stdout unless ``stdout`` is given.
        max_log_bytes: the maximum size of the log, in bytes.
        secrets: texts that must not appear in the log.
        cwd: the working directory; empty for ``directory``.
        stdin: descriptor of its input; None for none.
        stdout: descriptor of its output; None for the log.
        inherited: further descriptors that it inherits under the same numbers, such as a socket to serve.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    directory: str
    log: str
    max_log_bytes: int
    secrets: Sequence[str]
    cwd: str = ""
    stdin: int | None = None
    stdout: int | None = None
    inherited: Sequence[int] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All descriptors of this process that the program gets, each once."""
        given = [*self.inherited, *(fd for fd in (self.stdin, self.stdout) if fd is not None)]
        return tuple(dict.fromkeys(given))

    def to_json_line(self) -> bytes:
        """The spec as one line of JSON, for the supervisor."""
        return json.dumps(asdict(self)).encode() + b"\n"


def run_program(control_fd: int, parent: int) -> None:
    """Supervise one program, as the main function of the supervisor process.

    Args:
        control_fd: descriptor of the control socket.
        parent: id of the process that owns the program.
    """
    become_subreaper()
    with socket.socket(fileno=control_fd) as control:
        report: dict[str, object]
        try:
            report = {"exit": _supervise(control, parent)}
        except OSError as error:
            report = {"failed": str(error)}
        finally:
            kill_descendants()
        with contextlib.suppress(OSError):
            control.sendall(json.dumps(report).encode())
    os._exit(0)  # no interpreter shutdown is needed, and the owner waits for this exit


def _supervise(control: socket.socket, parent: int) -> int | None:
    """Run the program to its end. Returns its exit status; None if it was asked to end, also before the start."""
    line = b""
    while b"\n" not in line:
        if not (read := control.recv(1 << 16)):
            return None
        line += read
    line, _, rest = line.partition(b"\n")
    if rest:
        return None  # asked to end before the start
    spec = ProgramSpec(**json.loads(line))
    log = RotatingLog(Path(spec.log), spec.max_log_bytes, spec.secrets)
    reading, writing = os.pipe()
    program = subprocess.Popen(
        spec.command,
        env={**spec.env, DIRECTORY_VARIABLE: spec.directory},
        cwd=spec.cwd or spec.directory,
        stdin=subprocess.DEVNULL if spec.stdin is None else spec.stdin,
        stdout=writing if spec.stdout is None else spec.stdout,
        stderr=writing,
        pass_fds=spec.inherited,
        preexec_fn=_prepare_child,  # noqa: PLW1509  (the supervisor has one thread)
    )
    for descriptor in (writing, *spec.descriptors):
        os.close(descriptor)
    os.set_blocking(reading, False)
    try:
        return _wait_for_end(program.pid, control, parent, reading, log)
    finally:
        kill_descendants()
        while _copy_output(reading, log):
            pass
        log.close()


def _prepare_child() -> None:
    """Runs in the child between fork and exec."""
    reset_signals()
    set_parent_death_signal()


def _wait_for_end(program: int, control: socket.socket, parent: int, output: int, log: RotatingLog) -> int | None:
    # A fork of the dead parent may hold the control socket open. The parent is therefore checked every second.
    watch = ChildWatch(program, lambda: os.getppid() == parent)
    watched = [control.fileno(), output]
    deadline, pending = float("inf"), b""
    while time.monotonic() < deadline:
        readable = watch.wait(watched, max(0.0, min(1.0, deadline - time.monotonic())))
        if readable is None:
            return watch.status
        if output in readable and not _copy_output(output, log):
            watched.remove(output)
        if control.fileno() in readable:
            if not (read := control.recv(64)):
                return None
            *lines, pending = (pending + read).split(b"\n")
            for seconds in lines:
                deadline = min(deadline, time.monotonic() + float(seconds))
                os.kill(program, signal.SIGTERM)
    return None


def _copy_output(output: int, log: RotatingLog) -> bool:
    """Copy available output to the log. Returns False at the end, or if nothing is available."""
    try:
        data = os.read(output, 1 << 16)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)
