"""Put the runs of the demo beside one another: a table for `docs/results`, and their curves as a picture.

    python scripts/demo_results.py PICTURE.svg RUN_DIR [RUN_DIR ...]

Prints the table as Markdown. Needs matplotlib, which the extra `dev` brings.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from agentfly.core.run_directory import RunDirectory
from agentfly.core.yaml_reader import read_yaml
from agentfly.viewing.report import RunSummary

HEADINGS = ["seed", "steps", "first reward", "last reward", "held-out before", "held-out after", "minutes"]


def seed_of(run: RunDirectory) -> int:
    """The seed that a run was made with."""
    seed: int = read_yaml(run.config_file.read_bytes(), str(run.config_file))["training"]["seed"]
    return seed


def table_row(run: RunDirectory) -> list[str]:
    """What one run came to."""
    summary = RunSummary.of(run)
    assert summary.success_before is not None
    assert summary.success_after is not None
    seed = seed_of(run)
    seconds = sum(row.values["time/step_s"] for row in run.metrics())
    return [
        str(seed),
        str(summary.steps),
        f"{summary.reward_start:.2f}",
        f"{summary.reward_end:.2f}",
        f"{summary.success_before.mean:.0%}",
        f"{summary.success_after.mean:.0%}",
        f"{seconds / 60:.1f}",
    ]


def draw(runs: list[RunDirectory], picture: Path) -> None:
    """The mean reward of each step, a line a run."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        rewards = RunSummary.of(run).rewards
        axes.plot(range(1, len(rewards) + 1), rewards, label=f"seed {seed_of(run)}")
    axes.set(xlabel="training step", ylabel="mean reward", ylim=(-0.25, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(ncols=len(runs), fontsize="small", loc="lower right")
    figure.savefig(picture)


def main() -> None:
    """Print the table and draw the picture."""
    picture, *paths = map(Path, sys.argv[1:])
    runs = [RunDirectory(path) for path in paths]
    rows = [HEADINGS, ["---"] * len(HEADINGS), *(table_row(run) for run in runs)]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    draw(runs, picture)


if __name__ == "__main__":
    main()
