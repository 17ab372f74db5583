"""Cost of Docker and Podman containers, compared with the command-line program of the engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from agentfly.benchmarks.resources.bare import BareShell
from agentfly.benchmarks.resources.sandboxes import measure_backend, measure_many
from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers.backend import get_backend
from agentfly.resources.containers.spec import ContainerSpec

ENGINES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}
"""The backends, each with the environment variable that holds the address of its engine."""

_ANSWER = ["bash", "-c", "read; echo; read"]
_PLAIN = [
    "--network=none",
    "--ulimit=nofile=4096:4096",
    "--ulimit=nproc=4096:4096",
]  # all that users may set


def measure_engine_backend(name: str, image: str, *, rounds: int = 10, commands: int = 200, count: int = 64) -> Any:
    """Measure containers of an engine against its command-line program, and many containers at once.

    Args:
        name: the backend: ``docker`` or ``podman``.
        image: the name of an image that the engine has.
        rounds: number of containers.
        commands: number of commands in a session.
        count: number of containers alive at once.

    Returns:
        The result of `measure_backend`, and under ``many`` the result of `measure_many`.

    Raises:
        PrerequisiteError: such containers cannot be started on this machine.
    """
    spec = ContainerSpec(image=image, backend=name, memory="512MiB")  # type: ignore[arg-type]
    found = get_backend(name).probe()
    if not found.available:
        raise PrerequisiteError(" ".join(found.missing))
    found.check(spec)
    program = _Program(name, os.environ.get(ENGINES[name], ""))
    measured = measure_backend(
        spec,
        bare_start=program.start,
        bare_shell=partial(program.shell, image),
        rounds=rounds,
        commands=commands,
    )
    return {**measured, "many": measure_many(spec, count)}


def measures_of(image: str | None) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a function per engine that measures it. Without an image, the function raises `PrerequisiteError`."""
    return {name: partial(_with_image, name, image) for name in ENGINES}


def _with_image(name: str, image: str | None) -> Any:
    if image is None:
        raise PrerequisiteError(f"no image was given. Add --image with the name of an image that {name} has.")
    return measure_engine_backend(name, image)


class _Program:
    """The command-line program of an engine."""

    def __init__(self, name: str, address: str) -> None:
        if shutil.which(name) is None:
            raise PrerequisiteError(f"the program {name}, which containers are compared with, is not installed.")
        self._words = [name]
        self._remove = ["rm", "--force", *(["--time=0"] if name == "podman" else [])]  # docker does not wait by itself
        if address:
            self._words += ["--host", address] if name == "docker" else ["--remote", "--url", address]

    def start(self, spec: ContainerSpec, number: int) -> tuple[float, float]:
        """Milliseconds from the call of ``run`` to the first reply of a shell, and of ``rm --force``."""
        name = f"agentfly-bench-{os.getpid()}-{number}"
        limits = [*_PLAIN, f"--memory={spec.memory_limit}", f"--pids-limit={spec.pids}", f"--name={name}"]
        began = time.perf_counter()
        with subprocess.Popen(
            [*self._words, "run", "--interactive", *limits, spec.image, *_ANSWER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            if not process.stdout.read(1):
                raise PrerequisiteError(f"{' '.join(self._words)} could not run a container of {spec.image}.")
            ready = time.perf_counter()
            self._call(*self._remove, name)
            gone = time.perf_counter()
        return (ready - began) * 1e3, (gone - ready) * 1e3

    @contextmanager
    def shell(self, image: str) -> Iterator[BareShell]:
        """A bash in a container, on the pipes of ``exec``."""
        name = f"agentfly-bench-{os.getpid()}-shell"
        self._call("run", "--detach", *_PLAIN, f"--name={name}", image, "sleep", "infinity")
        shell = BareShell([*self._words, "exec", "--interactive", name, "bash", "--norc", "--noprofile"])
        try:
            yield shell
        finally:
            shell.close()
            self._call(*self._remove, name)

    def _call(self, *words: str) -> None:
        done = subprocess.run([*self._words, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PrerequisiteError(f"{' '.join([*self._words, *words])} failed: {done.stderr.strip()}")
