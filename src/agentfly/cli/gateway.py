"""``agentfly gateway``: serve a policy under OpenAI's chat API, and record what programs do with it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentfly import interruption
from agentfly.errors import ConfigError
from agentfly.garbage import tuned_gc

if TYPE_CHECKING:
    from agentfly.policies.policy import Policy


def gateway(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name, Hugging Face id or directory of the model.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Answers in place of a model: texts, or a function of the prompt."),
    ] = None,
    vllm: Annotated[
        list[str] | None,
        typer.Option("--vllm", metavar="URL", help="A server of vLLM that serves the model, or several."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.jsonl", help="Where finished trajectories are added.")
    ] = Path("trajectories.jsonl"),
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 8100,
    token_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Holds the API key that programs must send.")
    ] = None,
    tool_call_format: Annotated[
        str | None, typer.Option(metavar="NAME", help="How the model writes tool calls; its own way if not given.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Replaces the temperature that programs ask for.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of an answer.")] = None,
) -> None:
    """Serve a model to agent programs of any kind, and record the tokens of their rollouts.

    The base URL of a program is http://HOST:PORT/rollouts/ID/v1, with an ID of its own for every rollout.
    A rollout ends with POST http://HOST:PORT/rollouts/ID/finish and {"reward": 1.0}.
    """
    if (model is None) == (script is None):
        raise ConfigError("Name a model, or answers by --script: one of the two.")
    if vllm and model is None:
        raise ConfigError("--vllm says where the model is served: name the model, too.")
    policy = _scripted(script) if script is not None else _loaded(str(model), vllm or [])
    settings = {
        "host": host,
        "port": port,
        "token": _token(token_env),
        "model": model or "script",
        "tool_call_format": tool_call_format,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    interruption.run(_served(policy, output, settings))


async def _served(policy: Policy, output: Path, settings: dict[str, Any]) -> None:
    from agentfly.gateway.gateway import Gateway
    from agentfly.trajectory import Trajectory, save_trajectories

    def keep(trajectory: Trajectory) -> None:
        save_trajectories([trajectory], output, append=True)

    async with policy, Gateway(policy, on_finish=keep, **settings) as gateway:
        typer.echo(f"serving {settings['model']} at {gateway.url('ID')}")
        typer.echo(f"finished trajectories: {output}", err=True)
        if settings["token"] is None and settings["host"] not in ("127.0.0.1", "localhost", "::1"):
            typer.echo("whoever reaches this machine may use it: ask for a key by --token-env", err=True)
        with tuned_gc():
            await asyncio.Event().wait()


def _loaded(model: str, urls: list[str]) -> Policy:
    if urls:
        from agentfly.policies.vllm.policy import VLLMPolicy

        return VLLMPolicy(urls=urls, model=model)
    from agentfly.policies.load import load_policy

    return load_policy(model)


def _scripted(reference: str) -> Policy:
    from agentfly.cli.references import load_reference
    from agentfly.policies.scripted import ScriptedPolicy

    return ScriptedPolicy(load_reference(reference, base=Path.cwd(), field="--script"))


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"--token-env {variable}: the environment has no such variable, or it is empty.")
    return token
