"""``agentfly bench``: what AgentFly costs on this machine, as ratios of the best possible."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(help="Measure what AgentFly costs on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")]


@app.command("rollouts")
def rollouts(
    only: Annotated[
        str | None,
        typer.Option(help="Measure these workloads only, separated by commas.", metavar="A,…", show_default="all"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measure each workload so often, and tell the median.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Efficiency of many concurrent rollouts with known latencies: best possible time / measured time.

    A: 64 rollouts of 1 to 9 turns, 0.1 s a generation, tools of 5 to 50 ms. B: 256 of them. C: 64, 0.1 to 0.2 s a
    generation, a few tools far longer than most. D: 128 of 1 to 3 turns, tools of 0.5 to 1.5 s. E: 1,024 of 1 to 9
    turns, 1 to 2 s a generation, tools of up to 20 s. Each of these is measured with async and with sync functions as
    tools. F: E through a pool of 128 sandboxes that take 0.5 s to start, half of the tools sync functions.
    """
    from agentfly.benchmarks.rollouts.measure import render, run_rollouts_bench

    names = None if only is None else [name.strip() for name in only.split(",")]
    _show(run_rollouts_bench(names, repeats), render, as_json)


@app.command("sampling")
def sampling(
    model: Annotated[str, typer.Option(help="The model: a shipped name, a Hugging Face id, or a directory.")] = "tiny",
    vllm: Annotated[
        str | None,
        typer.Option(help="Compare with vLLM: an interpreter or a virtual environment that has it.", metavar="PYTHON"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second of rollouts of several turns: 32 at once, one at a time, and transformers' own static batch."""
    from agentfly.benchmarks.sampling import render, run_sampling_bench

    _show(run_sampling_bench(model, vllm_python=vllm), render, as_json)


@app.command("resources")
def resources(
    only: Annotated[
        str | None,
        typer.Option(help="Measure these parts only, separated by commas.", metavar="PART,…", show_default="all"),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="For docker and podman: an image that they have, or the path of a root file system, with which "
            "engines of their own are run for the measurement (as root). Where it has repositories, episodes in them "
            "are measured, on bubblewrap too."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Cost of the engine, use of pools against the optimum, and containers against the bare program of each backend.

    The parts are engine, occupancy, environments, bubblewrap, docker and podman.
    """
    from agentfly.benchmarks.resources.run import PARTS, render, run_resources_bench

    parts = PARTS if only is None else [part.strip() for part in only.split(",")]
    _show(run_resources_bench(parts, image), render, as_json)


def _show(result: dict[str, Any], render: Callable[[dict[str, Any]], RenderableType], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(render(result))
