"""Reference: what the trainer's side says of token ids, for the proof that servers serve its weights."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentfly.errors import PrerequisiteError
from agentfly.policies.extras import require_packages
from agentfly.threads.pool import on_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Reference = Callable[[Sequence[int]], Sequence[float] | Awaitable[Sequence[float]]]
"""Log-probs, at temperature 1, of each of N token ids but the first given those before it: N - 1 numbers."""


async def ask(reference: Reference, ids: Sequence[int]) -> tuple[float, ...]:
    """What a reference says. One that is no coroutine function is called on a thread of its own."""
    if inspect.iscoroutinefunction(reference):
        return tuple(await reference(ids))
    found = await on_thread(reference, ids)
    return tuple(await found if inspect.isawaitable(found) else found)


def model_reference(model: PreTrainedModel) -> Reference:
    """A reference by a transformers model in this process, such as the `model` of an `EmbeddedPolicy`."""
    import torch

    def logprobs(ids: Sequence[int]) -> Sequence[float]:
        row = torch.tensor([list(ids)], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        wanted = row[0, 1:, None]
        numbers: list[float] = logits.log_softmax(-1).gather(1, wanted)[:, 0].tolist()
        return numbers

    return logprobs


def directory_reference(model: Path, weights: Path | None, adapter: Path | None) -> Reference:
    """A reference that loads the model anew, in float32 on the processor, each time it is asked.

    Args:
        model: the model's directory.
        weights: where its weights are, if elsewhere.
        adapter: directory of a LoRA adapter on top.
    """

    def logprobs(ids: Sequence[int]) -> Sequence[float]:
        found = model_reference(_load(model, weights, adapter))(ids)
        assert not inspect.isawaitable(found)
        return found

    return logprobs


def _load(model: Path, weights: Path | None, adapter: Path | None) -> PreTrainedModel:
    require_packages("To prove an update without a reference of yours, the model", "torch", "transformers")
    import torch
    from transformers import AutoModelForCausalLM

    from agentfly.policies.embedded.loading import quiet_transformers

    try:
        with quiet_transformers():
            loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                weights or model, dtype=torch.float32, local_files_only=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise PrerequisiteError(
            f"The weights in {weights or model} cannot be loaded by transformers to prove the update ({error}). Give "
            "update_weights a reference, a function that scores token ids with the trainer's own model."
        ) from error
    return loaded if adapter is None else _merged(loaded, adapter)


def _merged(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    require_packages("To prove an adapter without a reference of yours, it", "peft")
    from peft import PeftModel

    merged: PreTrainedModel = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return merged
