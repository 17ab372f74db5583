"""Settings of a policy: which of them go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from agentfly.durations import require_whole
from agentfly.errors import ConfigError
from agentfly.resources.models.spec import ModelServerSpec

RUNNING: dict[str, Literal["wait", "keep"]] = {"drain": "wait", "mark": "keep"}
"""What becomes of running generations in an update, by the word for it."""


def check_settings(
    spec: ModelServerSpec | None,
    servers: int,
    urls: Sequence[str],
    model: str | Path | None,
    in_flight: str,
    raw_logprobs: bool,
) -> None:
    """See that the settings of a `VLLMPolicy` go together.

    Raises:
        ConfigError: they do not.
    """
    if isinstance(spec, str | Path):
        name = str(spec)
        cure = (
            f"VLLMPolicy(urls=[{name!r}], model='…')"
            if name.startswith(("http://", "https://"))
            else f"VLLMPolicy(af.ModelServerSpec(model={name!r}, device='gpu'))"
        )
        raise ConfigError(f"VLLMPolicy({name!r}): it takes the spec of the servers to start. Write {cure}.")
    if spec is not None and not isinstance(spec, ModelServerSpec):
        raise ConfigError(f"VLLMPolicy({spec!r:.100}): it takes a ModelServerSpec: af.ModelServerSpec(model=…).")
    if isinstance(urls, str) or not isinstance(urls, Sequence):
        raise ConfigError(f"VLLMPolicy(urls={urls!r:.100}): write a list of addresses: ['http://host:8000/v1'].")
    if (spec is None) == (not urls):
        raise ConfigError(
            "VLLMPolicy needs a ModelServerSpec of servers to start, or urls of running ones: one of both."
        )
    if urls and (model is None or servers != 1):
        raise ConfigError("VLLMPolicy(urls=…) needs model=…, for the tokenizer, and no number of servers.")
    if len(set(urls)) < len(urls):
        raise ConfigError("VLLMPolicy(urls=…) has an address twice.")
    require_whole("VLLMPolicy", servers=servers)
    if spec is not None and spec.data_parallel > 1:
        raise ConfigError(
            "VLLMPolicy shares rollouts out among servers itself, so that each stays with its cache, and proves every "
            "one of them: leave out data_parallel, and give servers=… instead."
        )
    if in_flight not in RUNNING:
        raise ConfigError(f"in_flight={in_flight!r}: write 'drain' or 'mark'.")
    if raw_logprobs and spec is not None and spec.adapters:
        raise ConfigError("raw_logprobs=True: vLLM cannot score tokens on servers with adapters. Leave out one.")


def settled_spec(spec: ModelServerSpec, model: Path, servers: int) -> ModelServerSpec:
    """A spec with room for so many servers, whose model is the directory that the tokenizer is from."""
    name = spec.served_name or spec.model
    return replace(spec, model=str(model), served_name=name, capacity=max(spec.capacity, servers))
