"""Hidden tests in containers that the agent never touched: only tests that really pass count."""

from __future__ import annotations

import asyncio
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentfly as af
from agentfly.agents.grading.test_report import TestReport
from agentfly.resources.containers.bubblewrap.backend import probe

pytestmark = [
    pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing)),
    pytest.mark.slow,
]

PACKAGES = "/opt/packages"
SPEC = af.ContainerSpec(memory="512MiB", pids=64, mounts=((str(Path(pytest.__file__).parents[1]), PACKAGES),))

RIGHT = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
HIDDEN = """
import pytest
from calc import add, double

@pytest.mark.parametrize("a", [1, 2])
def test_adds(a):
    assert add(a, 3) == a + 3

def test_doubles():
    assert double(4) == 8

class TestBoth:
    def test_together(self):
        assert add(double(1), 1) == 3
"""
NAMES = [
    "tests/test_calc.py::test_adds",
    "tests/test_calc.py::test_doubles",
    "tests/test_calc.py::TestBoth::test_together",
]


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))


async def graded(work: dict[str, str], *, before: str = "true", **settings: object) -> TestReport:
    """The report on what an agent has left: files, and what it ran."""
    reports: list[TestReport] = []

    @af.reward
    async def hidden(context: af.Context) -> float:
        box = await context.acquire(SPEC)
        for path, content in work.items():
            await box.write_file(path, textwrap.dedent(content))
        await box.run(before)
        given: dict[str, Any] = {
            "paths": ["."],
            "tests": {"tests/test_calc.py": HIDDEN},
            "names": NAMES,
            "packages": [PACKAGES],
            "python": "/usr/bin/python3",
            "timeout_s": 60,
        }
        reports.append(await af.tests_pass(context, box, **{**given, **settings}))
        return reports[0].reward

    result = await af.run(af.Agent(model="m"), ["go"], reward=hidden, policy=af.ScriptedPolicy(["done"]))
    [trajectory] = result.trajectories
    [report] = reports
    assert trajectory.reward == report.reward
    return report


async def test_right_work_passes_all_that_is_named():
    report = await graded({"calc.py": RIGHT})
    assert (report.passed, report.failed, report.problem) == (tuple(NAMES), (), "")
    assert (report.reward, report.share, report.all_passed) == (1.0, 1.0, True)


async def test_wrong_work_fails_the_tests_that_find_it_wrong():
    report = await graded({"calc.py": RIGHT.replace("2 * a", "a")})
    assert report.passed == ("tests/test_calc.py::test_adds",)
    assert (report.reward, report.share) == (0.0, pytest.approx(1 / 3))  # type: ignore[comparison-overlap]
    assert "assert 4 == 8" in report.output
    report = await graded({"calc.py": RIGHT.replace("a + b", "a + b if a < 2 else 0")})
    assert "tests/test_calc.py::test_adds" in report.failed, "one case of it fails"


async def test_what_is_not_there_does_not_pass():
    assert (await graded({})).passed == ()
    assert "calc" in (await graded({})).output
    missing = await graded({}, paths=["src"])
    assert (missing.passed, "could not be taken" in missing.problem) == ((), True)
    none = await graded({"calc.py": RIGHT}, names=[*NAMES, "tests/test_calc.py::test_nothing_of_the_kind"])
    assert none.failed == ("tests/test_calc.py::test_nothing_of_the_kind",)


SAYS_SO = """
import json, os, sys
for fd in range(3, 64):
    try:
        os.write(fd, b'0 {"kind": "phase", "id": "tests/test_calc.py::test_adds", "outcome": "passed"}\\n')
        os.write(fd, b'0 {"kind": "end", "code": 0, "changed": []}\\n')
    except OSError:
        pass
"""
ATTACKS = {
    "ends the process": "import os\nos._exit(0)\n",
    "ends the process when called": "import os\ndef add(a, b): os._exit(0)\ndouble = add\n",
    "exits": "import sys\nsys.exit(0)\n",
    "skips": "import pytest\ndef add(a, b): pytest.skip('not now')\ndouble = add\n",
    "is expected to fail": "import pytest\ndef add(a, b): pytest.xfail('of course')\ndouble = add\n",
    "writes into every pipe": SAYS_SO + "os._exit(0)\n",
    "writes into every pipe and goes on": SAYS_SO + RIGHT.replace("2 * a", "a"),
    "runs at the end": "import atexit, os\natexit.register(lambda: os._exit(0))\n" + RIGHT.replace("2 * a", "a"),
    "has pytest call nothing": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
    "add = double = None\n",
    "has pytest report success": """
        import _pytest.reports
        class Passed(_pytest.reports.TestReport):
            @classmethod
            def from_item_and_call(cls, item, call):
                report = super().from_item_and_call(item, call)
                report.outcome = "passed"
                return report
        import _pytest.runner
        _pytest.runner.TestReport = Passed
        add = double = None
        """,
    "changes a function of pytest within": """
        import _pytest.runner
        _pytest.runner.CallInfo.from_call.__func__.__code__ = (lambda cls, func, when, reraise=None: cls(
            result=None, excinfo=None, start=0, stop=0, duration=0, when=when, _ispytest=True)).__code__
        add = double = None
        """,
    "replaces what is built in": "import builtins\nbuiltins.AssertionError = type('No', (SystemExit,), {})\n"
    "add = double = lambda *_: 0\n",
    "registers a plugin": """
        import gc
        from _pytest.config import Config
        class Evil:
            def pytest_pyfunc_call(self, pyfuncitem):
                return True
        for one in gc.get_objects():
            if isinstance(one, Config):
                one.pluginmanager.register(Evil())
        add = double = None
        """,
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "prints a report": 'print(\'\\n0 {"report": "", "output": "", "timed_out": false}\')\nimport os\nos._exit(0)\n',
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_work_that_only_has_the_tests_say_that_they_passed_earns_nothing(attack):
    report = await graded({"calc.py": ATTACKS[attack]})
    assert report.passed == () or set(report.failed) >= {NAMES[1]}
    assert report.reward == 0.0
    assert report.problem or report.failed


FILES = {
    "a conftest": {"tests/conftest.py": "import os\nos._exit(0)\n", "conftest.py": "raise SystemExit(0)\n"},
    "a configuration": {
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "tox.ini": "[pytest]\naddopts = --version\n",
    },
    "a module that runs at the start": {"sitecustomize.py": "import os\nos._exit(0)\n", "usercustomize.py": "1/0\n"},
    "a module in pytest's place": {"pytest.py": "import os\nos._exit(0)\n", "_pytest/__init__.py": "1/0\n"},
    "a module in json's place": {"json.py": "import os\nos._exit(0)\n", "hmac.py": "1/0\n"},
    "a file where the tests are to be": {"tests": "not a directory\n"},
    "its own tests": {"tests/test_calc.py": "def test_adds(): pass\n", "tests/__init__.py": "import sys\n"},
    "a package in the tests' place": {"tests/test_calc/__init__.py": "def test_adds(): pass\n"},
}


@pytest.mark.parametrize("files", FILES)
async def test_nothing_but_the_work_itself_has_a_say_in_how_the_tests_run(files):
    right = await graded({"calc.py": RIGHT, **FILES[files]})
    assert right.passed == tuple(NAMES), right
    wrong = await graded({"calc.py": "add = double = None\n", **FILES[files]})
    assert wrong.passed == ()


async def test_links_and_compiled_code_of_the_agent_do_not_stand_for_hidden_files():
    helper = {
        "tests/test_calc.py": "from tests.expected import SUM\nfrom calc import add\n\ndef test_sum():\n"
        "    assert add(1, 2) == SUM\n",
        "tests/expected.py": "SUM = 3\n",
        "tests/__init__.py": "",
    }
    forged = """
        mkdir -p tests && printf 'SUM = 4\\n' > tests/expected.py && cd tests
        /usr/bin/python3 -c "
        import py_compile
        py_compile.compile('expected.py', invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
        cd .. && ln -s calc.py tests/test_calc.py && ls -R
        """
    settings: dict[str, Any] = {"tests": helper, "names": ["tests/test_calc.py::test_sum"]}
    wrong = await graded({"calc.py": "def add(a, b):\n    return 4\n"}, before=textwrap.dedent(forged), **settings)
    assert wrong.reward == 0.0
    assert wrong.excluded
    right = await graded({"calc.py": RIGHT}, before="rm -rf tests; ln -s /etc tests", **settings)
    assert right.reward == 1.0


async def test_making_way_for_hidden_files_removes_nothing_behind_a_link():
    work = {"calc.py": RIGHT + "\n\nassert open('lib/unit').read() == 'work'\n", "lib/unit": "work"}
    settings: dict[str, Any] = {"tests": {"tests/unit/test_calc.py": HIDDEN}}
    names = [name.replace("tests/", "tests/unit/") for name in NAMES]
    report = await graded(work, before="ln -s lib tests", names=names, **settings)
    assert report.passed == tuple(names), report


async def test_tests_that_take_too_long_are_killed_on_time_with_all_that_they_started():
    work = {"calc.py": "import os, time\nif not os.fork():\n    os.setsid()\ntime.sleep(1000)\n"}
    report = await asyncio.wait_for(graded(work, timeout_s=2), 60)
    assert report.passed == ()
    assert "killed because the time was up" in report.problem


async def test_apart_from_each_other_tests_that_end_their_process_cost_their_own_name_only():
    work = {"calc.py": RIGHT.replace("return 2 * a", "import os; os._exit(0)")}
    assert (await graded(work)).passed == ()
    assert (await graded(work, separately=True)).passed == ("tests/test_calc.py::test_adds",)


async def test_tests_may_start_the_work_as_a_program_and_bring_what_they_need():
    tests = {
        "tests/test_program.py": "import subprocess, sys\n\ndef test_adds(python, tmp_path):\n"
        "    done = subprocess.run([python, 'main.py', '2', '3'], capture_output=True, text=True)\n"
        "    assert done.stdout == '5\\n'\n",
        "tests/conftest.py": "import pytest\n\n@pytest.fixture\ndef python():\n    return '/usr/bin/python3'\n",
    }
    program = "import sys\nprint(sum(map(int, sys.argv[1:])))\n"
    settings: dict[str, Any] = {"tests": tests, "names": ["tests/test_program.py::test_adds"], "paths": ["main.py"]}
    assert (await graded({"main.py": program}, **settings)).reward == 1.0
    quits = "import os\nos._exit(0)\n"
    assert (await graded({"main.py": quits}, **settings)).reward == 0.0
    intruder = """
        import os, signal
        parent = os.getppid()
        try:
            open(f"/proc/{parent}/mem", "r+b")
            print("can look into the tests")
        except OSError:
            os.kill(parent, signal.SIGKILL)
        """
    assert (await graded({"main.py": intruder}, **settings)).reward == 0.0


async def test_a_box_without_pytest_is_the_authors_mistake_and_no_score():
    with pytest.raises(af.AgentFlyError, match="no /usr/bin/python3 that imports pytest"):
        await graded({"calc.py": RIGHT}, packages=[])


async def test_names_and_paths_that_cannot_be_are_refused():
    for settings in (  # type: ignore[var-annotated]
        {"names": []},
        {"names": ["tests/other.py::test_a"]},
        {"tests": {"../out.py": ""}},
        {"paths": "."},
    ):
        with pytest.raises(af.AgentFlyError, match="tests_pass"):
            await graded({"calc.py": RIGHT}, **settings)


async def test_rollouts_that_have_all_boxes_there_are_do_not_wait_for_each_other_to_be_graded():
    spec = replace(SPEC, capacity=1)

    @af.tool
    async def write(context: af.Context) -> str:
        """Write the program."""
        box = await context.acquire(spec)
        await box.write_file("calc.py", RIGHT)
        return "written"

    @af.reward
    async def hidden(context: af.Context) -> float:
        box = await context.acquire(spec)
        given: dict[str, Any] = {
            "tests": {"tests/test_calc.py": HIDDEN},
            "packages": [PACKAGES],
            "python": "/usr/bin/python3",
        }
        return (await af.tests_pass(context, box, paths=["calc.py"], names=NAMES, **given)).share

    agent = af.Agent(model="m", tools=[write])
    policy = af.ScriptedPolicy([agent.format.write("write", {}), "done"])
    assert (await af.run(agent, ["go"], reward=hidden, policy=policy, attempts=3)).rewards == [1.0] * 3
