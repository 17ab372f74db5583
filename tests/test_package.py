"""The package as users get it: fast to import, complete in its wheel, and usable in an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import agentfly

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "numpy", "httpx", "ray", "vllm", "docker", "tensorboard", "mcp", "PIL")


def python(program: str, *, executable: Path | str = sys.executable, cwd: Path | None = None) -> str:
    done = subprocess.run([str(executable), "-c", program], check=False, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


SETTINGS = "import agentfly.training.config.train_config, agentfly.training.sft.config"


@pytest.mark.parametrize("statement", ["import agentfly", "import agentfly.cli.main", SETTINGS])
def test_importing_loads_nothing_heavy(statement):
    program = [
        "import sys, time",
        "began = time.perf_counter()",
        statement,
        "print(round(time.perf_counter() - began, 3), 's')",
        f"print([name for name in {HEAVY!r} if name in sys.modules])",
    ]
    took, loaded = python("\n".join(program)).splitlines()
    print(f"{statement}: {took}")
    assert loaded == "[]"


def test_every_public_name_is_there_and_nothing_else_pretends_to_be():
    for name in agentfly.__all__:
        assert getattr(agentfly, name) is not None
    assert set(agentfly.__all__) <= set(dir(agentfly))
    with pytest.raises(AttributeError, match="no_such_name"):
        agentfly.no_such_name  # noqa: B018


def test_the_version_of_the_package_is_the_version_of_the_distribution():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert agentfly.__version__ == declared.group(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    tracked = {
        str(path.relative_to(source))
        for path in (source / "agentfly").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert tracked <= held
    assert "agentfly/py.typed" in held
    assert any(name.startswith("agentfly/") and name.endswith(".safetensors") for name in held)
    assert {"agentfly/tasks/stockroom/tiny.yaml", "agentfly/tasks/stockroom/smollm2-135m.yaml"} <= held
    assert {f"agentfly/policies/models/{name}/model.safetensors" for name in ("tiny", "tiny-depot")} <= held
    assert wheel.stat().st_size < 8_000_000


SCRIPTED = """
import asyncio
import agentfly as af

SANDBOX = af.ContainerSpec(memory="256MiB", capacity=2)

@af.tool
async def shell(command: str, context: af.Context) -> str:
    '''Run a command.

    Args:
        command: the command line.
    '''
    box = await context.acquire(SANDBOX)
    return (await box.run(command)).stdout

@af.reward
def right(response: str, answer: str) -> float:
    return float(answer in response)

call = '<tool_call>\\n{"name": "shell", "arguments": {"command": "echo $((6*7))"}}\\n</tool_call>'
policy = af.ScriptedPolicy([call, "It is 42."])
agent = af.Agent(model="scripted", tools=[shell])
result = asyncio.run(af.run(agent, [{"prompt": "6*7?", "answer": "42"}], reward=right, policy=policy))
print(result.rewards, result.trajectories[0].turns[0].tool_results[0].observation.strip())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_installs_and_works_in_an_empty_environment(wheel, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # which would add to it
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    binaries = tmp_path / "venv" / "bin"
    install = [binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True)

    installed = python("import agentfly; print(agentfly.__file__)", executable=binaries / "python", cwd=tmp_path)
    assert str(tmp_path / "venv") in installed
    version = subprocess.run([binaries / "agentfly", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == f"agentfly {agentfly.__version__}"
    doctor = subprocess.run(
        [binaries / "agentfly", "doctor"], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "agentfly-rl[train]" in re.sub(r"\s+", " ", doctor.stdout)
    assert python(SCRIPTED, executable=binaries / "python", cwd=tmp_path).strip() == "[1.0] 42"

    subprocess.run([binaries / "agentfly", "init", "look-up"], capture_output=True, check=True, cwd=tmp_path)
    written = {path.name for path in (tmp_path / "look-up").iterdir()}
    assert written == {"README.md", "config.yaml", "look_up.py", "test_look_up.py"}

    config = tmp_path / "config.yaml"
    config.write_text("agent: json:dumps\ntasks: x.jsonl\n")
    trained = subprocess.run(
        [binaries / "agentfly", "train", config], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert trained.returncode == 1
    assert f"pip install 'agentfly-rl[train] @ {Path(wheel).as_uri()}'" in trained.stderr
    assert "Traceback" not in trained.stderr
