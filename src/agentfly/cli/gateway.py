"""``agentfly gateway``: serve a policy by OpenAI's chat API, and record the tokens of programs' rollouts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentfly.core import signals
from agentfly.core.errors import ConfigError
from agentfly.core.gc_tuning import tuned_gc

if TYPE_CHECKING:
    from agentfly.policies.policy import Policy


def gateway(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name, Hugging Face id or directory of the model.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Answers instead of a model: texts, or a function of the prompt."),
    ] = None,
    vllm: Annotated[
        list[str] | None,
        typer.Option("--vllm", metavar="URL", help="A vLLM server that serves the model; may be repeated."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE.jsonl", help="The file to which finished trajectories are appended."
        ),
    ] = Path("trajectories.jsonl"),
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free port.")] = 8100,
    public_host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="The host in the URLs of programs, if it differs from --host."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Another host name that requests may use; may be repeated."),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable with the harness's key. By default, a key is generated and printed.",
        ),
    ] = None,
    tool_call_format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tool-call format; by default the format of the model.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="The sampling temperature. Requests cannot change it.")
    ] = 1.0,
    honor_request: Annotated[
        bool,
        typer.Option(
            "--honor-request", help="Use the sampling parameters of requests. Their answers are excluded from training."
        ),
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens per answer.")] = None,
    max_calls: Annotated[int, typer.Option(min=1, help="Maximum number of answered calls per rollout.")] = 1_000,
) -> None:
    """Serve a model to agent programs of any kind, and record the tokens of their rollouts.

    A rollout starts with POST http://HOST:PORT/rollouts and {"rollout_id": "ID"}, which answers with the base URL and
    the key for its program, and ends with POST http://HOST:PORT/rollouts/ID/finish and {"reward": 1.0}. Both need the
    harness's key: Authorization: Bearer KEY.
    """
    if (model is None) == (script is None):
        raise ConfigError("Give either a model or --script.")
    if vllm and model is None:
        raise ConfigError("--vllm is the address of a server: also name the model that it serves.")
    policy = _load_script(script) if script is not None else _load_policy(str(model), vllm or [])
    settings = {
        "host": host,
        "port": port,
        "public_host": public_host,
        "allowed_hosts": allowed_host or [],
        "key": _key(key_env),
        "model": model or "script",
        "tool_call_format": tool_call_format,
        "max_tokens": max_tokens,
    }
    sampling = {"temperature": temperature, "honor_request": honor_request}
    signals.run_until_signal(_serve(policy, output, settings, sampling, max_calls))


async def _serve(
    policy: Policy, output: Path, settings: dict[str, Any], sampling: dict[str, Any], max_calls: int
) -> None:
    from agentfly.core.trajectory import Trajectory, save_trajectories
    from agentfly.gateway.gateway import Gateway
    from agentfly.gateway.limits import GatewayLimits
    from agentfly.gateway.model_request import RolloutSampling

    def keep(trajectory: Trajectory) -> None:
        save_trajectories([trajectory], output, append=True)

    more: dict[str, Any] = {"sampling": RolloutSampling(**sampling), "limits": GatewayLimits(max_calls=max_calls)}
    async with policy, Gateway(policy, on_finish=keep, **settings, **more) as gateway:
        typer.echo(f"serving {settings['model']} at {gateway.url}")
        if settings["key"] is None:
            typer.echo(f"the harness's key, until this ends: {gateway.key}", err=True)
        typer.echo(f"finished trajectories: {output}", err=True)
        if settings["host"] not in ("127.0.0.1", "localhost", "::1"):
            typer.echo("this is plain HTTP, and machines in between can read the keys", err=True)
        with tuned_gc():
            await asyncio.Event().wait()


def _load_policy(model: str, urls: list[str]) -> Policy:
    if urls:
        from agentfly.policies.vllm.policy import VLLMPolicy

        return VLLMPolicy(urls=urls, model=model)
    from agentfly.policies.load import load_policy

    return load_policy(model)


def _load_script(reference: str) -> Policy:
    from agentfly.core.references import load_reference
    from agentfly.policies.scripted import ScriptedPolicy

    return ScriptedPolicy(load_reference(reference, base=Path.cwd(), field="--script"))


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--key-env {variable}: the environment has no such variable, or it is empty.")
    return key
