from __future__ import annotations

import errno
import json
import re
import subprocess
import sys

import pytest

from agentfly import __version__
from agentfly.cli import main as cli
from agentfly.core.errors import ConfigError, PrerequisiteError, ResourceError
from agentfly.core.installation import install_command


@pytest.fixture
def agentfly(monkeypatch, capsys):
    """Run the command line in this process; answers exit code, standard output and standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["agentfly", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


def failing(monkeypatch, error: BaseException) -> None:
    """Have ``agentfly doctor`` fail."""

    def fail():
        raise error

    monkeypatch.setattr("agentfly.cli.doctor.diagnose", fail)


def test_the_version_is_shown(agentfly):
    assert agentfly("--version") == (0, f"agentfly {__version__}\n", "")


def test_help_names_every_command(agentfly):
    code, out, _ = agentfly("--help")
    assert code == 0
    for command in ("demo", "train", "eval", "rollout", "models", "doctor", "bench", "resources"):
        assert command in out


def test_an_unknown_command_or_option_exits_with_2(agentfly):
    assert agentfly("trian")[0] == 2
    assert agentfly("doctor", "--fast")[0] == 2


@pytest.mark.parametrize(
    ("error", "code", "report"),
    [
        (ConfigError("write it so"), 2, "write it so"),
        (PermissionError(errno.EACCES, "Permission denied", "/home/of/another"), 1, "/home/of/another"),
        (PrerequisiteError("get [bold]this[/bold]"), 1, "get [bold]this[/bold]"),
        (ResourceError("it broke"), 1, "it broke"),
        (ExceptionGroup("several", [ResourceError("first"), ResourceError("second")]), 1, "first"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/model"), 1, "holds /data/model"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "no space left"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, install_command("train")),
    ],
)
def test_a_failure_that_a_user_can_mend_is_one_message_without_a_traceback(agentfly, monkeypatch, error, code, report):
    failing(monkeypatch, error)
    left, out, err = agentfly("doctor")
    assert left == code
    assert out == ""
    assert err.startswith("error: ")
    assert report in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        ExceptionGroup("mixed", [ResourceError("x"), ValueError("a bug")]),
        OSError(errno.EIO, "disk"),
    ],
)
def test_a_bug_is_shown_as_one(agentfly, monkeypatch, error):
    failing(monkeypatch, error)
    monkeypatch.setattr(sys, "argv", ["agentfly", "doctor"])
    with pytest.raises(type(error)):
        cli.main()


def test_an_interrupt_exits_silently_with_130(agentfly, monkeypatch):
    failing(monkeypatch, KeyboardInterrupt())
    code, out, err = agentfly("doctor")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("module", ["agentfly", "agentfly.cli.main"])
def test_the_command_can_be_run_as_a_module(module):
    command = [sys.executable, "-m", module, "--version"]
    assert subprocess.run(command, check=True, capture_output=True).stdout.decode() == f"agentfly {__version__}\n"


@pytest.mark.parametrize("words", [(), ("bench",), ("models",), ("resources",)])
def test_a_command_without_its_rest_shows_its_help(agentfly, words):
    code, out, err = agentfly(*words)
    assert code in (0, 2)
    assert "Usage" in out + err


def test_doctor_as_json_is_json(agentfly):
    code, out, _ = agentfly("doctor", "--json")
    findings = json.loads(out)
    assert {"Python", "processor", "sandbox", "models", "disk"} <= {finding["what"] for finding in findings}
    assert code == int(any(finding["verdict"] == "missing" for finding in findings))


def test_doctor_lists_missing_parts_with_remedies_and_exits_with_1(agentfly, monkeypatch):
    from agentfly.cli.doctor import CheckStatus, MachineCheck

    findings = [
        MachineCheck("a", CheckStatus.OK, "here"),
        MachineCheck("b", CheckStatus.MISSING, "not here", "install b"),
    ]
    monkeypatch.setattr("agentfly.cli.doctor.diagnose", lambda: iter(findings))
    code, out, _ = agentfly("doctor")
    assert code == 1
    assert re.search(r"missing\s+b\s+not here\s+install b", out)
