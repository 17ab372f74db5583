"""What containers of docker and podman cost beside the engine's own program, and episodes in them with a warm pool."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentfly.benchmarks.churn import measure_episodes
from agentfly.benchmarks.resources.bare import BareShell
from agentfly.benchmarks.resources.sandboxes import measure_backend, measure_many
from agentfly.core import signals
from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers.backend import get_backend
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.testing.private_engines import PRIVATE_ENGINES, import_image

ENGINES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}
"""The backends, each with the variable that says where its engine listens."""

_IMPORTED = "agentfly-bench"
_ANSWER = ["bash", "-c", "read; echo; read"]
_PLAIN = ["--network=none", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]  # more is not everybody's to give


def measure_engine_backend(name: str, image: str, *, rounds: int = 10, commands: int = 200, count: int = 64) -> Any:
    """Measure an engine's containers beside its command-line program, many at once, and episodes in them.

    Args:
        name: the backend.
        image: the path of an archive of a root file system, for which an engine of its own is run as long as it is
            measured (that needs root); or the name of an image that the engine of this machine has. Where it has
            repositories in ``/testbed`` (see ``scripts/make_bench_image.py``), episodes are measured too.
        rounds: how many containers.
        commands: how many commands in a session.
        count: how many containers at once.

    Returns:
        What `measure_backend` gives; ``many``, what `measure_many` gives; and what `measure_episodes` gives.

    Raises:
        PrerequisiteError: such containers cannot be started on this machine.
    """
    with _engine(name, image) as (address, image_name):
        spec = ContainerSpec(image=image_name, backend=name, memory="512MiB")  # type: ignore[arg-type]
        get_backend(name).probe().check(spec)
        program = _Program(name, address)
        measured = measure_backend(
            spec,
            bare_start=program.start,
            bare_shell=partial(program.shell, image_name),
            rounds=rounds,
            commands=commands,
        )
        return {**measured, "many": measure_many(spec, count), **signals.run_until_signal(measure_episodes(spec))}


def measures_of(image: str | None) -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each engine with an image; without one, it says that an image is needed."""
    return {name: partial(_with_image, name, image) for name in ENGINES}


def _with_image(name: str, image: str | None) -> Any:
    if image is None:
        raise PrerequisiteError(
            f"no image was given. Add --image with a name that {name} has, or with the path of a root file system as "
            "scripts/make_bench_image.py makes one."
        )
    return measure_engine_backend(name, image)


@contextmanager
def _engine(name: str, image: str) -> Iterator[tuple[str, str]]:
    """An engine that has the image: where it listens, and the image's name."""
    if not image.startswith(("/", ".")):
        found = get_backend(name).probe()
        if not found.available:
            raise PrerequisiteError(" ".join(found.missing))
        yield os.environ.get(ENGINES[name], ""), image
        return
    if not Path(image).is_file():
        raise PrerequisiteError(f"--image {image}: there is no such file.")
    variable, before = ENGINES[name], os.environ.get(ENGINES[name])
    with PRIVATE_ENGINES[name]() as address:
        import_image(address, Path(image), _IMPORTED)
        os.environ[variable] = address
        try:
            yield address, f"{_IMPORTED}:latest"
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before


class _Program:
    """The command-line program of an engine."""

    def __init__(self, name: str, address: str) -> None:
        if shutil.which(name) is None:
            raise PrerequisiteError(f"the program {name}, beside which containers are measured, is not there.")
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
