"""Trust: a simulator process cannot run code in this process, and sees no state of it or of the last owner."""

from __future__ import annotations

import asyncio
import builtins  # noqa: F401  (for what the simulator is told to do)
import enum
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile  # noqa: F401
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from agentfly.core.errors import ConfigError, ModelAPIError, ResourceDied, ToolError, UsageError
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.remote_error import RemoteError
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.environments.worker_process import reap
from agentfly.resources.resource import Status

Starts = Literal["fork", "spawn"]
both_starts = pytest.mark.parametrize("starts", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])

HIDDEN = {"JUDGE_API_KEY": "sk-secret", "AWS_SECRET_ACCESS_KEY": "secret"}
STATE: list[str] = []


class Touching:
    """A pickle of it makes a file where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return _touch, (self.path,)


def _touch(path: str) -> str:
    Path(path).touch()
    return path


class TouchingError(Exception):
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return _touch, (self.args[0],)


class IllegalMove(ValueError):
    """An exception that is made of something else than its message."""

    def __init__(self, move: str, *, board: object = None) -> None:
        super().__init__(f"{move} is illegal")
        self.move = move
        self.board = board


class Weather(enum.Enum):
    RAIN = 1


@dataclass(frozen=True)
class Seen:
    text: str
    weather: Weather
    picture: Any


class Simulator:
    def __init__(self) -> None:
        self.calls = 0

    def reset(self) -> str:
        return "fresh"

    def call_it(self, source: str) -> Any:
        """Whatever a test wants to know or do."""
        self.calls += 1
        return eval(textwrap.dedent(source).strip(), globals())

    def do(self, source: str) -> None:
        exec(textwrap.dedent(source), globals())

    def gives(self, path: str) -> Any:
        return {"inside": [Touching(path)]}

    def sees(self) -> Seen:
        return Seen("rain", Weather.RAIN, np.zeros((2, 2), np.uint8))

    def raises(self, what: str, path: str = "") -> None:
        if what == "touching":
            raise TouchingError(path)
        if what == "args":
            raise ValueError(Touching(path))
        if what == "attribute":
            error = ValueError("odd")
            error.it = Touching(path)  # type: ignore[attr-defined]
            error.row = 3  # type: ignore[attr-defined]
            raise error
        if what == "illegal":
            raise IllegalMove("e9", board=object())
        if what == "file":
            raise FileNotFoundError(2, "No such file or directory", "level.txt")
        if what == "api":
            raise ModelAPIError("no", status=503)
        if what == "forged":
            error = ToolError("sorry")  # type: ignore[assignment]
            error.__dict__ |= {"by_policy": False, "boundary": None, "note": "kept"}
            raise error

    def forges(self, frame: bytes) -> None:
        """Answer in place of what answers."""
        for descriptor in range(100):
            try:
                with socket.socket(fileno=os.dup(descriptor)) as calls:
                    calls.sendall(frame)
            except OSError:
                continue
        time.sleep(60)


@asynccontextmanager
async def started(**fields: Any) -> AsyncIterator[Environment]:
    environment = Environment(EnvironmentSpec(**{"factory": Simulator, "runs": "process", **fields}), "simulator-1")
    await environment.start()
    try:
        yield environment
    finally:
        await environment.release()


# --- what comes out -------------------------------------------------------------------------------------------------


async def test_a_result_that_would_run_something_where_it_is_read_does_not_leave_its_process(tmp_path: Path) -> None:
    async with started() as simulator:
        with pytest.raises(
            UsageError, match=r"the result\['inside'\]\[0\] is a .*Touching.*result_types.*allow_pickle"
        ):
            await simulator.gives(str(tmp_path / "touched"))
        for what in ("touching", "args", "attribute"):
            with pytest.raises(Exception, match=r"touched|odd|Touching"):
                await simulator.raises(what, str(tmp_path / "touched"))
        assert not (tmp_path / "touched").exists()
        assert await simulator.call_it("1 + 1") == 2


async def test_a_simulator_that_is_trusted_with_it_gives_any_object(tmp_path: Path) -> None:
    async with started(allow_pickle=True) as simulator:
        assert await simulator.gives(str(tmp_path / "touched")) == {"inside": [str(tmp_path / "touched")]}
        assert (tmp_path / "touched").exists()
        with pytest.raises(IllegalMove) as caught:
            await simulator.raises("illegal")
        assert (str(caught.value), caught.value.move) == ("e9 is illegal", "e9")
        with pytest.raises(RemoteError, match="touched"):
            await simulator.raises("touching", str(tmp_path / "touched"))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def frame(data: bytes, length: int | None = None) -> bytes:
    return struct.pack(">Q", len(data) if length is None else length) + data


FORGED = {
    "a pickle": lambda path: frame(pickle.dumps(Touching(path))),
    "a pickle as data": lambda path: frame(_data(("pickled", pickle.dumps(Touching(path))))),
    "an exception's pickle": lambda path: frame(_data(("error", ("x", "y"), pickle.dumps((Touching(path),))))),
    "no exception": lambda path: frame(_data(("error", (1, 2, 3, 4, 5, 6), None))),
    "another answer": lambda path: frame(_data(("value",))),
    "an answer without end": lambda path: frame(b"N", 2**62),
    "nonsense": lambda path: frame(b"\xff" * 100),
    "much nonsense": lambda path: frame(b"l\xff\xff\xff\x00" + b"N" * 1_000_000),
}


def _data(value: object) -> bytes:
    from agentfly.resources.environments.wire_format import encode
    from agentfly.resources.environments.wire_types import DeclaredTypes

    return encode(value, DeclaredTypes())


async def test_a_process_that_answers_in_another_way_is_lost_and_runs_nothing_here(tmp_path: Path) -> None:
    for what, forged in FORGED.items():
        async with started(call_timeout_s=20) as simulator:
            with pytest.raises(ResourceDied, match="its answer to forges"):
                await simulator.forges(forged(str(tmp_path / "touched")))
            assert simulator.quick_status() is await simulator.status() is Status.BROKEN, what
            with pytest.raises(ResourceDied, match="cannot be used"):
                await simulator.call_it("1")
        assert not (tmp_path / "touched").exists(), what


async def test_declared_types_come_out_as_themselves() -> None:
    async with started(result_types=(Seen, Weather, IllegalMove)) as simulator:
        seen = await simulator.sees()
        assert (type(seen), seen.text, seen.weather, seen.picture.shape) == (Seen, "rain", Weather.RAIN, (2, 2))
        with pytest.raises(IllegalMove) as caught:
            await simulator.raises("illegal")
        assert (str(caught.value), caught.value.move) == ("e9 is illegal", "e9")


async def test_an_exception_is_caught_by_what_it_derives_from_wherever_its_type_is_known() -> None:
    async with started() as simulator:
        with pytest.raises(ValueError, match="e9 is illegal") as caught:
            await simulator.raises("illegal")
        assert (type(caught.value).__name__, isinstance(caught.value, RemoteError)) == ("IllegalMove", True)
        assert "in raises\n" in "".join(caught.value.__notes__)

        with pytest.raises(FileNotFoundError) as missing:
            await simulator.raises("file")
        assert (type(missing.value), missing.value.errno, missing.value.filename) == (FileNotFoundError, 2, "level.txt")

        with pytest.raises(ValueError, match="odd") as odd:
            await simulator.raises("attribute")
        assert odd.value.row == 3  # type: ignore[attr-defined]

        with pytest.raises(ModelAPIError, match="no") as api:
            await simulator.raises("api")
        assert api.value.status == 503


async def test_an_exception_cannot_say_who_is_to_blame_for_it() -> None:
    async with started() as simulator:
        with pytest.raises(ToolError, match="sorry") as caught:
            await simulator.raises("forged")
        assert (caught.value.by_policy, caught.value.boundary) == (ToolError.by_policy, ToolError.boundary)
        assert caught.value.note == "kept"  # type: ignore[attr-defined]


# --- what is inside --------------------------------------------------------------------------------------------------

ENVIRONMENTS = """[open(f"/proc/{pid}/environ").read() for pid in
    (os.getpid(), os.getppid(), int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]))
    if pid != OWNER] + [str(dict(os.environ)), subprocess.run("env", capture_output=True, text=True).stdout]"""


@both_starts
async def test_no_secret_of_this_process_is_in_its_environment(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**HIDDEN, "LC_TIME": "de_DE.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    async with started(starts=starts, env={"LEVEL": "3", "HOME": "/elsewhere"}) as simulator:
        shown = "".join(await simulator.call_it(ENVIRONMENTS.replace("OWNER", str(os.getpid()))))
        assert not any(word in shown for word in (*HIDDEN, *HIDDEN.values()))
        inside = await simulator.call_it("dict(os.environ)")
    assert (inside["LEVEL"], inside["HOME"], inside["PATH"]) == ("3", "/elsewhere", os.environ["PATH"])
    assert inside["LC_TIME"] == "de_DE.UTF-8"


def test_what_its_environment_holds_is_not_shown() -> None:
    @dataclass(frozen=True, kw_only=True)
    class OwnSpec(EnvironmentSpec):
        """A kind of somebody's own."""

    for kind in (EnvironmentSpec, OwnSpec):
        spec = kind(factory=Simulator, runs="process", env={"KEY": "sk-secret"})
        assert "sk-secret" not in repr(spec)
        assert "KEY" in repr(spec)


@both_starts
async def test_it_works_in_a_directory_of_its_own_that_goes_with_it_whatever_is_left_there(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with started(starts=starts) as one, started(starts=starts) as other:
        places = [Path(await each.call_it("os.getcwd()")) for each in (one, other)]
        assert len({tmp_path, *places}) == 3
        assert [place.stat().st_mode & 0o077 for place in (places[0].parent, places[1].parent)] == [0, 0]
        assert await one.call_it("os.listdir()") == []
        await one.do("""
            Path("notes").write_text("mine")
            os.makedirs("a/b")
            Path("a/b/c").touch()
            os.chmod("a", 0)
            os.symlink("/", "root")
            tempfile.mkdtemp()
            tempfile.mkstemp()
        """)
        assert await one.call_it("tempfile.gettempdir()") == str(places[0].parent / "tmp")
        assert names_in(tmp_path) == []
    assert not any(place.parent.exists() for place in places)


async def test_it_works_where_its_spec_says_and_leaves_that(tmp_path: Path) -> None:
    (tmp_path / "levels").mkdir()
    (tmp_path / "levels/1").write_text("####")
    async with started(workdir=tmp_path / "levels") as simulator:
        assert await simulator.call_it("Path('1').read_text()") == "####"
        await simulator.do("Path('2').touch()")
    assert names_in(tmp_path / "levels") == ["1", "2"]
    gone = Environment(EnvironmentSpec(factory=Simulator, runs="process", workdir=str(tmp_path / "no")), "simulator-2")
    with pytest.raises((UsageError, FileNotFoundError), match="no"):
        await gone.start()
    await gone.release()


@pytest.mark.slow
def test_what_an_import_writes_lands_in_no_directory_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text("open('cache.bin', 'w').close()\nclass Simulator: pass\n")
    program = """
        import asyncio, sys
        from agentfly.resources.environments.environment import Environment
        from agentfly.resources.environments.spec import EnvironmentSpec

        async def main():
            simulator = Environment(EnvironmentSpec(factory="careless:Simulator", runs="process"), "s")
            await simulator.start()
            await simulator.release()

        asyncio.run(main())
    """
    (tmp_path / "tmp").mkdir()
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        timeout=100,
    )
    assert names_in(tmp_path) == ["careless.py", "tmp"]
    deadline = time.monotonic() + 20
    while names_in(tmp_path / "tmp") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert names_in(tmp_path / "tmp") == []


OWNER = """
    import asyncio, json, os
    from agentfly.resources.environments.environment import Environment
    from agentfly.resources.environments.spec import EnvironmentSpec

    class Simulator:
        def where(self):
            os.makedirs("a/b")
            return os.getcwd()

    async def main():
        environment = Environment(EnvironmentSpec(factory=Simulator, runs="process"), "m")
        await environment.start()
        print(json.dumps([await environment.where(), environment.traces]), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("keeper_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_its_directory_goes_though_its_owner_was_killed(keeper_too: bool, tmp_path: Path) -> None:
    import json

    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        place, traces = json.loads(owner.stdout.readline())
        assert traces["directory"] == str(Path(place).parent)
        if keeper_too:
            os.kill(traces["pid"], signal.SIGKILL)
    finally:
        owner.kill()
        owner.wait(timeout=90)
    if keeper_too:
        reap(traces)
        assert not Path(traces["directory"]).exists()
        reap(traces)
    deadline = time.monotonic() + 20
    while Path(traces["directory"]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(traces["directory"]).exists()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"env": {"A": "1"}}, r"env=….*runs='process'"),
        ({"workdir": "/tmp"}, r"workdir=….*runs='process'"),
        ({"result_types": (Seen,)}, r"result_types=….*runs='process'"),
        ({"allow_pickle": True}, r"allow_pickle=….*runs='process'"),
        ({"runs": "process", "result_types": (Simulator,)}, r"Simulator is not a dataclass"),
        ({"runs": "process", "result_types": ("Seen",)}, r"'Seen' is not a type"),
        ({"runs": "process", "result_types": Seen}, r"result_types=\("),
        ({"runs": "process", "allow_pickle": "yes"}, "True or False"),
        ({"runs": "process", "workdir": 3}, "the path of a directory"),
        ({"runs": "process", "env": {"A": 1}}, "pair of texts"),
    ],
)
def test_settings_of_a_process_that_cannot_be_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EnvironmentSpec(factory=Simulator, **fields)


# --- the next owner --------------------------------------------------------------------------------------------------

LOOK = """[os.getcwd() == START, os.environ.get("LEFT"), STATE, hasattr(builtins, "left"), os.listdir(),
    os.listdir(tempfile.gettempdir()), [p.pid for p in psutil.Process().children()],
    signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "left" in sys.argv]"""
FRESH = [True, None, [], False, [], [], [], True, False]
LEAVE = """
    START = os.getcwd()
    os.environ["LEFT"] = "behind"
    STATE.append("left")
    Path("file").touch()
    tempfile.mkstemp()
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 301 >/dev/null 2>&1 &"])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.argv.append("left")
    builtins.left = "behind"
    os.chdir("/")
"""


@both_starts
async def test_nothing_of_one_owner_is_seen_by_the_next(starts: Starts, tmp_path: Path) -> None:
    spec = EnvironmentSpec(factory=Simulator, runs="process", starts=starts, capacity=1)
    async with ResourceEngine(ledger=tmp_path) as engine:
        seen = []
        for owner in "abc":
            simulator = (await engine.acquire(spec, owner)).resource
            seen.append(await simulator.call_it("os.getpid()"))
            assert await simulator.call_it(LOOK.replace("START", "os.getcwd()")) == FRESH
            await simulator.do(LEAVE)
            left = await simulator.call_it("[p.pid for p in psutil.Process().children()]")
            await engine.release_owner(owner)
        assert len(set(seen)) == 3
        await engine.acquire(spec, "last")
        assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in left)


async def test_a_reset_that_is_said_to_be_enough_keeps_the_process(tmp_path: Path) -> None:
    spec = EnvironmentSpec(factory=Simulator, runs="process", capacity=1, reuse="reset")
    async with ResourceEngine(ledger=tmp_path) as engine:
        first = await (await engine.acquire(spec, "a")).resource.call_it("os.getpid()")
        await engine.release_owner("a")
        assert await (await engine.acquire(spec, "b")).resource.call_it("os.getpid()") == first


async def test_what_is_costly_to_make_for_each_owner_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentfly.resources.environments.environment.COSTLY_START_S", 0.0)
    monkeypatch.setattr(Environment, "_warned_costly", set())
    for fields in ({"reuse": "reset"}, {"reuse": "recreate"}, {}, {}):
        async with started(**fields):
            pass
    (told,) = [record.getMessage() for record in caplog.records]
    assert "reuse='reset'" in told


async def test_an_owners_own_reset_keeps_its_process() -> None:
    async with started() as simulator:
        pid = await simulator.call_it("os.getpid()")
        assert await simulator.reset() == "fresh"
        assert await simulator.call_it("os.getpid()") == pid


async def test_fresh_ones_stand_ready_where_the_spec_asks_for_it(tmp_path: Path) -> None:
    spec = EnvironmentSpec(factory=Simulator, runs="process", capacity=3, warm=1)
    async with ResourceEngine(ledger=tmp_path) as engine:
        await engine.acquire(spec, "a")
        await engine.release_owner("a")
        async with asyncio.timeout(60):
            while [one.state for one in engine.snapshot().pools[0].instances] != ["idle"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.snapshot().pools[0].instances[0].uses == 0
