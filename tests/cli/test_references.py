from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from agentfly.core.errors import ConfigError, ToolDefinitionError
from agentfly.core.references import load_reference


@pytest.fixture(autouse=True)
def _unchanged_import_state(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(reference: str, base: Path):
    return load_reference(reference, base=base, field="agent")


def test_a_reference_names_something_in_a_file_beside_the_configuration(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 41\n")
    (tmp_path / "mine.py").write_text("from neighbour import VALUE\nanswer = VALUE + 1\n")
    assert load("mine.py:answer", tmp_path) == 42
    assert load("mine:answer", tmp_path) == 42
    assert load("json:dumps", tmp_path)([1]) == "[1]"


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"where = {name!r}\n")
    assert [load(f"{name}/mine.py:where", tmp_path) for name in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize("file", ["mine_too.py", "mine_too/__init__.py", "mine_too/deep/inner.py"])
def test_a_shadowed_module_is_refused_and_can_be_named_by_its_file(tmp_path, file):
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name in ("a", "b"):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_text(f"where = {name!r}\n")
    assert [load(f"{module}:where", tmp_path / "a") for _ in range(2)] == ["a", "a"]
    with pytest.raises(ConfigError, match=rf"another one of that name .*Name it by its file: {file}:NAME"):
        load(f"{module}:where", tmp_path / "b")
    assert load(f"{file}:where", tmp_path / "b") == "b"


def test_definitions_of_a_file_can_be_sent_to_a_process_that_cannot_import_it(tmp_path):
    (tmp_path / "far.py").write_text("class Env:\n    pass\n")
    pickled = cloudpickle.dumps(load("far.py:Env", tmp_path))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).__name__)"
    other = subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, cwd="/", check=True)
    assert other.stdout == b"Env\n"


@pytest.mark.parametrize(
    ("reference", "output"),
    [
        ("agent", "Write 'module:name'"),
        (":agent", "Write 'module:name'"),
        ("none.py:agent", "there is no file"),
        ("no_such_module:agent", "there is no module 'no_such_module'"),
        ("mine.py:agnet", "Did you mean 'agent'?"),
        ("broken.py:x", "SyntaxError"),
        ("raising.py:x", "ZeroDivisionError: division by zero"),
        ("raising.py:x", "raising.py, line 2"),
        ("needing.py:x", "No module named 'not_installed_here'"),
    ],
)
def test_an_unresolved_reference_is_reported_with_its_field(tmp_path, reference, output):
    (tmp_path / "mine.py").write_text("agent = 1\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "raising.py").write_text("\nx = 1 / 0\n")
    (tmp_path / "needing.py").write_text("import not_installed_here\n")
    with pytest.raises(ConfigError) as refusal:
        load(reference, tmp_path)
    assert str(refusal.value).startswith("agent: ")
    assert output in str(refusal.value)


def test_errors_raised_by_the_users_module_are_shown(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from agentfly.core.errors import ToolDefinitionError\nraise ToolDefinitionError('no')\n"
    )
    with pytest.raises(ToolDefinitionError, match="no"):
        load("mine.py:agent", tmp_path)
