"""The programs in ``examples/`` run unchanged and print the documented output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, directory: Path) -> str:
    """Return the output of the example, started from another directory."""
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=elsewhere,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AGENTFLY_STATE_DIR": str(directory / "state")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(elsewhere.iterdir()) == [], "an example leaves nothing behind"
    return done.stdout


def test_every_example_is_tested() -> None:
    tested = {
        "chess_with_stockfish.py",
        "science_world.py",
        "guess_the_number.py",
        "judge_reward.py",
        "python_sandbox_agent.py",
    }
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == tested


@pytest.mark.slow
def test_guess_the_number_is_always_found_by_halving(tmp_path: Path) -> None:
    *games, mean = run("guess_the_number.py", tmp_path).splitlines()
    assert len(games) == 8
    for game in games:
        numbers = [int(number) for number in re.findall(r"\d+", game.partition("[")[2].partition("]")[0])]
        assert numbers[0] == 50
        assert 1 <= len(numbers) <= 7
        assert game.endswith("-> 1.0")
    assert mean == "mean reward 1.00"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("stockfish", path=f"{os.environ.get('PATH', '')}:/usr/games") is None,
    reason="There is no Stockfish here. On Debian and Ubuntu: apt install stockfish",
)
def test_stockfish_is_mated_in_two_by_each_of_eight(tmp_path: Path) -> None:
    *games, mean = run("chess_with_stockfish.py", tmp_path).splitlines()
    assert (
        games
        == ["7k/8/8/8/8/8/R7/1R4K1: a2a7 h8g8 b1b8 -> 1.0"] * 4 + ["k7/8/8/8/8/8/7R/6RK: h2h7 a8b8 g1g8 -> 1.0"] * 4
    )
    assert mean == "mean reward 1.00"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("java") is None, reason="There is no Java here. On Debian and Ubuntu: apt install default-jre-headless"
)
def test_three_experiments_are_solved_side_by_side(tmp_path: Path) -> None:
    *experiments, mean = run("science_world.py", tmp_path).splitlines()
    assert [line.partition(":")[0] for line in experiments] == [
        "find-animal",
        "find-non-living-thing",
        "lifespan-shortest-lived",
    ]
    assert all(line.endswith("-> 1.0") for line in experiments)
    assert mean == "mean reward 1.00"


@pytest.mark.slow
def test_the_judge_scores_three_answers_and_leaves_one_unscored(tmp_path: Path) -> None:
    printed = run("judge_reward.py", tmp_path)
    assert "light. -> 1.0" in printed
    assert "It just does. -> 0.0" in printed
    assert "than sound. -> 0.6" in printed
    assert "obviously. -> unscored" in printed
    assert "the judge gave no score: 'That is a matter of taste.'" in printed
    assert printed.splitlines()[-1] == "mean reward 0.53, unscored 1"


@pytest.mark.slow
def test_the_sandbox_agent_solves_its_tasks_by_running_code(tmp_path: Path) -> None:
    printed = run("python_sandbox_agent.py", tmp_path)
    for line in ("python: 338350", "python: 832040", "shell: 1 / 2 / 3 / 50", "shell: 1275"):
        assert f"  {line}\n" in printed
    assert "SyntaxError: '(' was never closed / [exit code 1]\n" in printed, "what a tool call did wrong is seen"
    assert re.search(r"python: no, .*\n  -> It is no,", printed)
    assert printed.count("[reward 1.0, answered]") == 4
    assert printed.splitlines()[-1] == "mean reward 1.00"
