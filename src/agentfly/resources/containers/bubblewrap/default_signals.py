"""DefaultSignals: has a program that is started find signals as they are by default."""

from __future__ import annotations

import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

# Python ignores these itself, and `subprocess` has its children not do so
_RESTORED = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
_STANDARD = (1 << 31) - 1


class DefaultSignals:
    """What a program inherits of this process, it may ignore for good: a shell cannot even be told to heed it again.

    So it is where a run was started by ``nohup``, or in the background by a script. What runs in a sandbox must find
    the same wherever its owner was started.
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
