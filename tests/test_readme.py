"""The README's program runs unchanged, and everything that it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def program() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return block


def output() -> str:
    (block,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    return block


def without_seconds(text: str) -> str:
    return re.sub(r"\d+\.\d+ s\b", "… s", text)


@pytest.mark.slow
def test_the_program_in_the_readme_runs_as_it_stands_and_prints_what_the_readme_says(tmp_path):
    (tmp_path / "program.py").write_text(program())
    done = subprocess.run(
        [sys.executable, "program.py"], check=False, capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert without_seconds(done.stdout) == without_seconds(output())
    assert done.stdout.startswith("[1.0, 1.0, 1.0]\n")


def test_the_program_in_the_readme_fits_a_screen():
    assert len([line for line in program().splitlines() if line.strip()]) <= 26


def test_every_make_target_and_command_of_the_readme_exists():
    from typer.main import get_command

    from agentfly.cli.main import app

    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (
        set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) == {"demo", "test", "check", "vllm"} <= targets
    )
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`agentfly ([a-z]+)", README))
    assert named == commands


def test_every_file_that_the_readme_links_to_is_there():
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / link.partition("#")[0]).exists(), link


def test_the_readme_links_to_every_guide():
    guides = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "guides").glob("*.md")}
    assert guides <= set(re.findall(r"\]\((?!http)([^)]+)\)", README))
