"""``agentfly bench``: the cost of AgentFly on this machine, compared with the best possible."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(help="Measure the cost of AgentFly on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")]


@app.command("rollouts")
def rollouts(
    only: Annotated[
        str | None,
        typer.Option(help="Measure only these workloads, separated by commas.", metavar="A,…", show_default="all"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repeat each workload and report the median.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the efficiency of concurrent rollouts with known latencies: best possible time / measured time.

    \b
    Workload  rollouts  turns   generation    tools
    A               64  1 to 9  0.1 s         5 to 50 ms
    B              256  1 to 9  0.1 s         5 to 50 ms
    C               64          0.1 to 0.2 s  a few far longer than most
    D              128  1 to 3                0.5 to 1.5 s
    E            1,024  1 to 9  1 to 2 s      up to 20 s
    F            1,024  as E, through a pool of 128 sandboxes that start in 0.5 s

    A to E are measured with async and with sync tools. In F, half of the tools are sync.
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
    """Measure tokens per second in multi-turn rollouts: 32 at once, one at a time, and transformers' static batch."""
    from agentfly.benchmarks.sampling import render, run_sampling_bench

    _show(run_sampling_bench(model, vllm_python=vllm), render, as_json)


@app.command("resources")
def resources(
    only: Annotated[
        str | None,
        typer.Option(help="Measure only these parts, separated by commas.", metavar="PART,…", show_default="all"),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="For docker and podman: the name of an image that they have.", metavar="NAME"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the engine, the occupancy of pools, and containers against the bare program of each backend.

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
