"""Training throughput: AgentFly against trl's GRPOTrainer on the same work, each in its own process.

Both train the same model in the same number format, on the same prompts with the same chat template. Group size, number
of sampled tokens and number of threads are equal. Each step is one AdamW update of all weights, without KL divergence
and without gradient checkpointing. The unit is sampled tokens per second over whole steps: rollouts, scoring and
update. The first step is excluded, because it includes one-time costs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from agentfly.core.errors import AgentFlyError, PrerequisiteError
from agentfly.policies.catalog import resolve_model
from agentfly.policies.embedded.loading import SMALL_MODEL, choose_threads
from benchmarks.training import agentfly_side, trl_side
from benchmarks.training.workload import SideResult, TrainingWorkload

TARGET_SPEEDUP = 1.5
"""Tokens a second of AgentFly's training over trl's."""

TARGET_MEMORY = 1.0
"""The most memory of AgentFly's process over the most of trl's: at most this."""

TURNS = 3
"""Turns of the rollouts of several turns, which trl's side does not run."""

_LIMIT_S = 1800.0
"""Seconds after which a side is given up."""


def run_training_bench(
    model: str | Path, work: TrainingWorkload | None = None, *, trl: str | Path | None = None
) -> dict[str, Any]:
    """Measure the training of a model. The result is a JSON value.

    Args:
        model: the model.
        work: the workload.
        trl: an interpreter, or a virtual environment, that has trl, to be compared with; None for no comparison.

    Raises:
        PrerequisiteError: the model or a package is missing, or there is no interpreter.
        AgentFlyError: a side failed, or the two did not train on the same numbers of tokens.
    """
    work = work or TrainingWorkload()
    interpreter = None if trl is None else _interpreter(Path(trl))
    threads = choose_threads(SMALL_MODEL)
    path = str(resolve_model(model).resolve())
    sides = {"agentfly": _own_side(work.specification(path, threads))}
    if interpreter is not None:
        command = [interpreter, str(Path(trl_side.__file__).resolve())]
        sides["trl"] = run_side("trl", command, work.specification(path, threads))
    compared = compare(sides["agentfly"], sides["trl"]) if "trl" in sides else None
    turns = replace(work, turns=TURNS)
    sides["agentfly_turns"] = _own_side(turns.specification(path, threads))
    return {
        "model": str(model),
        "work": asdict(work),
        "threads": threads,
        "sides": {name: _numbers(side) for name, side in sides.items()},
        **({} if compared is None else compared),
    }


def _interpreter(trl: Path) -> str:
    path = trl.expanduser()
    path = path / "bin" / "python" if path.is_dir() else path
    if not path.is_file():
        raise PrerequisiteError(
            f"There is no Python {path}, to run trl. Make an environment that has it with `make trl`, or with "
            "python3 -m venv .venv-trl && .venv-trl/bin/pip install trl==1.16.0 jmespath; then give --trl .venv-trl."
        )
    return str(path.absolute())


def _own_side(specification: dict[str, Any]) -> SideResult:
    return run_side("AgentFly", [sys.executable, "-m", agentfly_side.__name__], specification)


def run_side(name: str, command: Sequence[str], specification: dict[str, Any]) -> SideResult:
    """Run a side's program to its end and read what it measured: the last line that it prints.

    Raises:
        AgentFlyError: it failed, or took far too long.
    """
    try:
        done = subprocess.run(
            [*command, json.dumps(specification)], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise AgentFlyError(f"The side of {name} took more than {_LIMIT_S:.0f} s. Measure a smaller model.") from error
    output_lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not output_lines:
        complaint = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise AgentFlyError(f"The side of {name} failed (exit code {done.returncode}): {complaint}")
    return SideResult(**json.loads(output_lines[-1]))


def _numbers(side: SideResult) -> dict[str, Any]:
    return {
        **asdict(side),
        "tokens_per_second": round(side.tokens_per_second, 2),
        "tokens_per_cpu_second": round(side.tokens_per_cpu_second, 2),
    }


def compare(own: SideResult, other: SideResult) -> dict[str, float]:
    """Return the ratios of speed and memory of AgentFly to trl, with the targets.

    Raises:
        AgentFlyError: the two did not train on the same numbers of tokens.
    """
    if (own.tokens, own.sampled_tokens) != (other.tokens, other.sampled_tokens):
        raise AgentFlyError(
            f"The sides did not train on the same tokens, so nothing is compared: AgentFly on {own.tokens}, "
            f"{own.sampled_tokens} of them sampled, in its steps, and trl on {other.tokens}, {other.sampled_tokens}. "
            "Use a model whose chat template renders a user's message for both alike."
        )
    return {
        "speedup": round(own.tokens_per_second / other.tokens_per_second, 2),
        "target_speedup": TARGET_SPEEDUP,
        "speedup_by_cpu": round(own.tokens_per_cpu_second / other.tokens_per_cpu_second, 2),
        "memory": round(own.peak_mib / other.peak_mib, 2),
        "target_memory": TARGET_MEMORY,
    }


_LABELS = {"agentfly": "AgentFly", "trl": "trl GRPOTrainer", "agentfly_turns": f"AgentFly, {TURNS} turns with a tool"}


def render(result: dict[str, Any]) -> Table:
    """Return the result as a table."""
    work = result["work"]
    table = Table(
        title=f"Training {result['model']}, {work['dtype']}, {result['threads']} threads: {work['tasks']} x "
        f"{work['attempts']} rollouts a step, {work['sampled']} sampled tokens a turn",
        caption=_verdict(result),
    )
    for heading in ("", "tokens/s", "s a step", "CPU s a step", "peak MiB", "sampled of tokens a step"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, numbers in result["sides"].items():
        steps = len(numbers["step_seconds"])
        table.add_row(
            _LABELS[name],
            f"{numbers['tokens_per_second']:.1f}",
            f"{sum(numbers['step_seconds']) / steps:.2f}",
            f"{sum(numbers['step_cpu_seconds']) / steps:.2f}",
            f"{numbers['peak_mib']:.0f}",
            f"{numbers['sampled_tokens'][0]} of {numbers['tokens'][0]}",
        )
    return table


def _verdict(result: dict[str, Any]) -> str:
    if "speedup" not in result:
        return "Compared with nothing: --trl DIR adds trl's GRPOTrainer on the same work."
    return (
        f"{result['speedup']:.2f} times trl's tokens a second (target {result['target_speedup']}; by processor time "
        f"{result['speedup_by_cpu']:.2f}), {result['memory']:.2f} times its memory (target at most "
        f"{result['target_memory']})"
    )
