"""tests_pass: run hidden tests on an agent's files, in a fresh container that the agent has never touched."""

from __future__ import annotations

import inspect
import json
import posixpath
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from agentfly.agents.grading import pytest_harness
from agentfly.agents.grading.test_report import TestReport, all_failed, read_report
from agentfly.contexts.context import Context
from agentfly.core.errors import PrerequisiteError, ResourceDied, ToolError, UsageError, error_message
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.containers.command import require_type
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec

CHANGES_TESTS = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "sitecustomize.py", "usercustomize.py"}
)
"""Files that change how tests run, wherever they are, and so are never taken from an agent."""

COMPILED = frozenset({"__pycache__"})
"""Directories of code that may be other than its source."""

COMPILED_FILES = (".pyc", ".pyo", ".pth")


class AgentFiles:
    """Copies of the files and directories in an agent's container, on this machine.

    Args:
        folder: the directory of the copies; the caller removes it.

    Attributes:
        excluded: paths that were left out, because they would change how tests run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: list[tuple[str, Path]] = []
        self.excluded: list[str] = []

    async def download_from(self, box: Container, path: str, max_bytes: int) -> None:
        """Copy a file or directory out of a container.

        Raises:
            ToolError: it does not exist, or is too large.
            ResourceError: this machine has too little disk space.
            ResourceDied: the container has ended.
        """
        if _changes_tests(posixpath.basename(path)):
            self.excluded.append(path)
            return
        copy = self._folder / str(len(self._copies))
        lost = await box.download(path, copy, max_bytes=max_bytes)
        removed = await run_in_thread(_without_what_changes_tests, copy)
        self.excluded += [posixpath.join(path, each) for each in (*lost, *removed)]
        self._copies.append((path, copy))

    async def upload_to(self, box: Container) -> None:
        """Copy the files into another container. They replace its own files at the same paths.

        Raises:
            ToolError: the container has too little disk space.
            ResourceDied: the container has ended.
        """
        for path, copy in self._copies:
            at = shlex.quote(path)
            clear = f"if [ -d {at} ] && [ ! -L {at} ]; then find {at} -mindepth 1 -delete; else rm -f -- {at}; fi"
            await box.run(clear, new_process=True)
            await box.upload(copy, path)


def _without_what_changes_tests(copy: Path) -> list[str]:
    """Remove files from a copy that would change how tests run. Return their paths within it."""
    removed: list[str] = []
    if not copy.is_dir():
        return removed
    for path in sorted(copy.rglob("*"), key=lambda path: len(path.parts)):
        if not _changes_tests(path.name) or not (path.is_symlink() or path.exists()):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        removed.append(str(path.relative_to(copy)))
    return removed


def _changes_tests(name: str) -> bool:
    return name in CHANGES_TESTS or name in COMPILED or name.endswith(COMPILED_FILES)


# ruff: noqa: PT028  (a function whose name begins with test, and that is none)


SLACK_S = 30.0
"""Seconds beyond the time for the tests that starting and ending them may take."""

MAX_OUTPUT_BYTES = 64 * 2**20
"""Bytes that the supervisor may say."""

_CANARY_WORDS = ("again", "twice", "once_more", "in_order", "at_the_end", "of_nothing", "by_itself", "as_before")


async def tests_pass(
    context: Context,
    work: Container,
    *,
    paths: Sequence[str],
    tests: Mapping[str, str | bytes],
    names: Sequence[str],
    spec: ContainerSpec | None = None,
    timeout_s: float = 300.0,
    separately: bool = False,
    plugins: Sequence[str] = (),
    pytest_ini: str = "[pytest]\n",
    import_from: Sequence[str] = (".",),
    packages: Sequence[str] = (),
    python: str = "python3",
    max_bytes: int = 256 * 2**20,
) -> TestReport:
    """Run hidden tests on the files that an agent left, and count which of them passed.

    The agent's files are copied into a new container, in which the agent never ran. The test files then overwrite files
    of the same path, and pytest runs the named tests. A test counts as passed only if pytest reports success for all
    its phases, through a channel that the tested code does not know. In addition, the test process must end by itself,
    pytest must be unchanged, and tests that cannot pass must fail. So ``os._exit(0)``, a report written by the tested
    code, the agent's own ``conftest.py``, and a pytest that passes everything all count as failures. Two attacks
    remain: code that runs in the test process and is written to find this channel, and a value that claims to equal any
    other. Tests that start the agent's program as a separate process share nothing with it.

    Args:
        context: the reward's context.
        work: the container as the agent left it.
        paths: the files and directories in it that are the agent's work; relative paths start from its workdir. Each
            replaces the file or directory at the same path in the new container.
        tests: the hidden files, by their paths below the workdir: tests, and all files that they need.
        names: the tests that count, as pytest names them: ``tests/test_sum.py::test_adds``. Without the part in
            brackets, a name stands for all cases of a test. A class or file stands for all its tests.
        spec: the new container; by default the spec of the agent's.
        timeout_s: maximum number of seconds for all tests together, without container starts. Then they are killed, and
            none of them counts as passed.
        separately: run the tests of each name in a separate process. A test that ends its process, or never ends, then
            affects only its own name.
        plugins: modules of pytest plugins that the tests need; none is loaded automatically.
        pytest_ini: pytest's configuration; the agent's files are never used for it.
        import_from: directories below the workdir from which tests import. The directory of the tests is not included.
        packages: further directories of the container with packages, if its Python lacks pytest.
        python: the Python in the container.
        max_bytes: maximum size of the agent's work in bytes. More counts as failed.

    Raises:
        UsageError: there are no names, or the file of a name is not among ``tests``.
        PrerequisiteError: the new container has no Python with pytest.
        ResourceError: the new container could not be acquired.
    """
    _check(work, paths, tests, names)
    fresh = replace(spec or work.spec, reuse="recreate", max_uses=1, warm=0)  # and so another pool than the agent's
    order = _TestRun(names, tests, plugins, pytest_ini, import_from, packages, python)
    found: list[TestReport] = []
    with tempfile.TemporaryDirectory(prefix="agentfly-grading-") as folder:
        taken = AgentFiles(Path(folder))
        try:
            for path in paths:
                await taken.download_from(work, path, max_bytes)
        except ToolError as error:  # it is not there, or too large: the agent's doing
            return all_failed(names, f"The work could not be taken: {error}")
        for some in [[name] for name in names] if separately else [list(names)]:
            left = timeout_s - sum(each.seconds for each in found)
            found.append(await _run_with_one_retry(context, fresh, taken, replace(order, names=some), left))
    return TestReport(
        tuple(name for each in found for name in each.passed),
        tuple(name for each in found for name in each.failed),
        "; ".join(dict.fromkeys(each.problem for each in found if each.problem)),
        "\n".join(each.output for each in found if each.output),
        tuple(taken.excluded),
        sum(each.seconds for each in found),
    )


tests_pass.__test__ = False  # type: ignore[attr-defined]  # it is no test of pytest's, whatever its name begins with


async def _run_with_one_retry(
    context: Context, fresh: ContainerSpec, work: AgentFiles, order: _TestRun, seconds: float
) -> TestReport:
    """Return the report of one run of tests. If the container dies, perhaps of the tested code, repeat it once."""
    if seconds <= 0:
        return all_failed(order.names, "The time was up before these tests began.")
    for _ in range(2):
        async with context.lease(fresh) as box:
            await order.require_pytest(box)
            try:
                return await order.carried_out(box, work, seconds)
            except ResourceDied as error:
                cause = error_message(error)
            except ToolError as error:  # the work leaves no room, or a file of it is where a directory should be
                return all_failed(order.names, f"The tests could not be run on the work: {error_message(error)}")
    return all_failed(order.names, f"The box died under the tests, twice: {cause}")


@dataclass(frozen=True)
class _TestRun:
    """One run of tests in a container."""

    names: Sequence[str]
    tests: Mapping[str, str | bytes]
    plugins: Sequence[str]
    pytest_ini: str
    import_from: Sequence[str]
    packages: Sequence[str]
    python: str

    async def require_pytest(self, box: Container) -> None:
        """Check that the container can run the tests.

        Raises:
            PrerequisiteError: its Python, pytest or a plugin is missing.
        """
        source = f"import sys; sys.path += {list(self.packages)!r}; import pytest, {', '.join(['os', *self.plugins])}"
        tried = await box.run(f"{self.python} -I -c {shlex.quote(source)}", timeout=60, new_process=True)
        if tried.exit_code:
            raise PrerequisiteError(
                f"tests_pass(): the box for the tests has no {self.python} that imports pytest"
                f"{' and ' + ', '.join(self.plugins) if self.plugins else ''}. Use an image that has them, or mount a "
                f"directory with them and name it in packages=. Its output: {str(tried)[-300:]}"
            )

    async def carried_out(self, box: Container, work: AgentFiles, seconds: float) -> TestReport:
        """Copy the work and the tests into the container, run the tests, and read their report.

        Raises:
            ToolError: the disk space of the container is too small for the tests beside the work.
            ResourceDied: the container died.
        """
        place = f"/tmp/grading-{secrets.token_hex(8)}"
        secret, key = secrets.token_hex(16), secrets.token_hex(16)
        canaries = [_canary(self.names, self.tests) for _ in range(2)]
        await work.upload_to(box)
        written = {**self.tests, **{canary.path: canary.text for canary in canaries}}
        await _remove_conflicting_paths(box, written)
        for path, content in written.items():
            await box.write_file(path, content)
        files = dict.fromkeys(name.partition("::")[0] for name in self.names)
        order = {
            "secret": secret,
            "root": box.workdir,
            "timeout_s": seconds,
            "tests": {
                "key": key,
                "names": [*self.names, *(canary.name for canary in canaries)],
                "plugins": list(self.plugins),
                "packages": list(self.packages),
                "import_from": [posixpath.normpath(posixpath.join(box.workdir, each)) for each in self.import_from],
                "arguments": [
                    *("-c", f"{place}/pytest.ini", f"--rootdir={box.workdir}", "--import-mode=importlib"),
                    *("-p", "no:cacheprovider", "--continue-on-collection-errors", "--color=no", "--tb=short", "-q"),
                    *(word for plugin in self.plugins for word in ("-p", plugin)),
                    *(canaries[0].path, *files, canaries[1].path),
                ],
            },
        }
        await box.write_file(f"{place}/harness.py", inspect.getsource(pytest_harness))
        await box.write_file(f"{place}/pytest.ini", self.pytest_ini)
        await box.write_file(f"{place}/order.json", json.dumps(order))
        started = time.monotonic()
        command = f"{self.python} -I -B {place}/harness.py supervise {place}/order.json"
        ended = await box.run(command, timeout=seconds + SLACK_S, new_process=True, max_output=MAX_OUTPUT_BYTES)
        report_lines = [line for line in ended.stdout.splitlines() if line.startswith(f"{secret} ")]
        if len(report_lines) != 1:
            output = str(ended)[-pytest_harness.MOST_OUTPUT :]
            return all_failed(self.names, "What ran the tests was ended.", output, time.monotonic() - started)
        return read_report(
            json.loads(report_lines[0].partition(" ")[2]), self.names, [one.name for one in canaries], key
        )


@dataclass(frozen=True)
class _Canary:
    """A test that cannot pass, in the same directory as the other tests and with a similar name."""

    path: str
    name: str
    text: str


def _canary(names: Sequence[str], tests: Mapping[str, str | bytes]) -> _Canary:
    file, _, test = secrets.choice(list(names)).partition("::")
    word, one = secrets.choice(_CANARY_WORDS), secrets.randbelow(1000)
    function = f"{(test or 'test_all').rpartition('::')[2].partition('[')[0]}_{word}"
    stem = f"{PurePosixPath(file).stem}_{word}_{secrets.token_hex(2)}"
    path = str(PurePosixPath(file).with_name(f"{stem}.py"))
    return _Canary(path, f"{path}::{function}", f"def {function}():\n    assert {one} == {one + 1}\n")


async def _remove_conflicting_paths(box: Container, files: Mapping[str, object]) -> None:
    """Remove paths of the work where hidden files, or their directories, go."""
    commands = []
    parents = {str(parent) for path in files for parent in PurePosixPath(path).parents if str(parent) != "."}
    for parent in sorted(parents, key=len):  # a link goes before anything is looked for behind it
        quoted = shlex.quote(parent)
        commands.append(
            f"if [ -L {quoted} ] || {{ [ -e {quoted} ] && [ ! -d {quoted} ]; }}; then rm -f -- {quoted}; fi"
        )
    commands += [f"rm -rf -- {shlex.quote(path)}" for path in files]
    await box.run("\n".join(commands), new_process=True)


def _check(work: Container, paths: Sequence[str], tests: Mapping[str, str | bytes], names: Sequence[str]) -> None:
    require_type(
        "work", work, Container, "the container as the agent left it: await context.acquire(SPEC)", of="tests_pass"
    )
    if not names or isinstance(names, str) or isinstance(paths, str):
        raise UsageError("tests_pass(): give lists of paths and of names of tests, at least one name.")
    for path in tests:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or path.startswith("-") or not pure.parts:
            raise UsageError(f"tests_pass(tests=…): {path!r} is no path below the workdir.")
    for name in names:
        file = name.partition("::")[0]
        if file not in tests:
            raise UsageError(f"tests_pass(names=…): {name!r} is in the file {file!r}, which is not among tests=….")
