"""FreshPython: how a part of this package is run by an interpreter of its own, and what its end is called."""

from __future__ import annotations

import json
import os
import signal
import sys

# The path is set before anything of AgentFly is imported, so that both sides run the same code.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from {module} import {function}; {function}(*json.loads(sys.argv[2]))"
)


def fresh_python(address: str, *arguments: int | str) -> list[str]:
    """The command line of a new interpreter that calls a function.

    Args:
        address: the function, as ``module:name``.
        arguments: what it is called with. They are on the command line, which everybody on the machine can read.
    """
    module, _, function = address.partition(":")
    boot = _BOOT.format(module=module, function=function)
    return [sys.executable, "-c", boot, json.dumps(search_path()), json.dumps(arguments)]


def search_path() -> list[str]:
    """Where Python looks for modules here, in words that mean the same in another directory.

    What Python passes over, such as a `Path` that somebody appended, is left out.
    """
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed
        return [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]  # noqa: PTH117
    return [os.path.join(here, entry) if entry else here for entry in sys.path if isinstance(entry, str)]  # noqa: PTH118


def end_in_words(status: int) -> str:
    """How a process ended.

    Args:
        status: its exit status; negative for the number of a signal.
    """
    if status >= 0:
        return f"it exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # one of the real-time signals, most of which have no name
        name = f"signal {-status}"
    return f"it was ended by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
