"""Weight synchronisation: transfer weights to servers, and check by log-probs that they serve them."""

from __future__ import annotations

import inspect
import logging
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from agentfly.core.errors import ConfigError, PrerequisiteError, WeightMismatch
from agentfly.core.installation import require_packages
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.process.ledger import REMOVE_DIRECTORY, CleanupRecord

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


WeightSource = Path | str | Iterable[tuple[str, "torch.Tensor"]]
"""Weights: a directory with safetensors files, or names and tensors as in a transformers state dict."""

AdapterSource = Path | str | Callable[[Path], object]
"""A LoRA adapter: a directory of peft's files, or a function that saves them into the directory it is given."""

logger = logging.getLogger(__name__)

_CONFIGURATIONS = ("config.json", "generation_config.json")


class WeightTransferDirectory:
    """Writes weights for servers, and keeps those that restarted servers may need.

    Args:
        model: the model's directory. Its configuration files are copied beside the weights.
        directory: the directory to write in; by default the system's directory for temporary files. Servers on other
            machines must see it under the same path.
    """

    def __init__(self, model: Path, directory: Path | None = None) -> None:
        self._model = model
        self._parent = directory
        self._home: Path | None = None
        self._record: CleanupRecord | None = None
        self._numbers = count(1)

    def write_weights(self, source: WeightSource) -> Path:
        """Return the directory of weights. An iterator's weights are first written to one, which blocks.

        Raises:
            ConfigError: the directory has no safetensors files.
        """
        if isinstance(source, str | Path):
            path = Path(source).expanduser().resolve()
            if not any(path.glob("*.safetensors")):
                raise ConfigError(f"{path} has no safetensors files. Save the model there with save_pretrained.")
            return path
        require_packages("Writing weights for servers", "torch", "huggingface_hub", "safetensors")
        from huggingface_hub import save_torch_state_dict

        path = self._new()
        for name in _CONFIGURATIONS:
            if (self._model / name).is_file():
                shutil.copy(self._model / name, path)
        save_torch_state_dict({name: tensor.detach() for name, tensor in source}, path)
        return path

    def write_adapter(self, source: AdapterSource) -> Path:
        """Return the directory of an adapter. A function's adapter is first written to one, which blocks.

        Raises:
            ConfigError: the directory holds no adapter.
        """
        if isinstance(source, str | Path):
            path = Path(source).expanduser().resolve()
        else:
            path = self._new()
            source(path)
        if not (path / "adapter_config.json").is_file():
            raise ConfigError(f"{path} holds no LoRA adapter: it has no adapter_config.json. Save one with peft.")
        return path

    def keep_only(self, *paths: Path | None) -> None:
        """Remove everything that was written, except the given directories."""
        if self._home is not None:
            for old in self._home.iterdir():
                if old not in paths:
                    remove_tree(old)

    def close(self) -> None:
        """Remove everything that was written."""
        if self._home is not None and self._record is not None:
            try:
                remove_tree(self._home)
            except OSError as error:  # it stays in the cleanup record for a later process
                logger.warning("Weights for servers are left in %s: %s", self._home, error)
            else:
                self._record.close()
            self._home = self._record = None

    def _new(self) -> Path:
        if self._home is None:
            home = Path(self._parent or tempfile.gettempdir()) / f"agentfly-weights-{uuid.uuid4().hex}"
            record = CleanupRecord("weights", REMOVE_DIRECTORY, {"directory": str(home.absolute())})
            try:
                home.mkdir(mode=0o700)
            except BaseException as error:
                record.close()
                if isinstance(error, OSError):
                    raise PrerequisiteError(
                        f"Weights for servers cannot be written to {home.parent}: {error.strerror}. Make that a "
                        "directory that this process can write to, or name another one."
                    ) from error
                raise
            self._home, self._record = home, record
        path = self._home / str(next(self._numbers))
        path.mkdir()
        return path


PROBE = (
    "The little girl walked to the house of her grandmother, who lived on the other side of the forest. On the way she "
    "met a wolf. He asked her where she was going, and she told him that her grandmother was ill."
)
"""The text that trainer and servers score: plain words, because unlikely texts show rounding errors most."""

PROBE_TOKENS = 32
"""Maximum number of its tokens that are scored."""

TOLERANCES = {"float32": 0.002}
"""Mean difference in nats per token that counts as rounding, by the type that the server computes in."""

LOW_PRECISION = 0.06
"""The same for all other types. In bfloat16, a model of 135 million parameters differs from float32 by 0.04."""

_MOVED = 1e-4  # nats: if the reference changed by more than this, the served log-probs must change, too


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Compares the served log-probs of one probe with a reference.

    Attributes:
        ids: token ids of the probe.
        max_logprob_gap: largest mean difference, in nats per token, that counts as rounding.
    """

    ids: tuple[int, ...]
    max_logprob_gap: float

    def check(
        self,
        server: str,
        served: Sequence[float],
        expected: Sequence[float],
        before: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> float:
        """Return the mean absolute difference between served and expected log-probs.

        Args:
            server: the server's name in messages.
            served: log-probs of all ids of the probe but the first, from the server.
            expected: the same log-probs from the reference.
            before: both before the update, if known.

        Raises:
            WeightMismatch: the difference is larger than rounding, or the server's log-probs did not change at all.
        """
        distance = mean_abs_difference(served, expected)
        if not distance <= self.max_logprob_gap:  # and so also if it is not a number
            raise WeightMismatch(
                f"{server} does not serve the weights it was given: the log-probs of a probe of {len(self.ids)} tokens "
                f"differ by {distance:.3g} nats a token from the reference's, of which rounding explains "
                f"{self.max_logprob_gap:g}. Nothing is sampled until an update succeeds. If vLLM's own "
                "reload_weights made the update, use the worker extension agentfly_weights. If the reference "
                "computes in another precision, set max_logprob_gap."
            )
        if before is not None:
            was_served, was_expected = before
            moved = mean_abs_difference(expected, was_expected)
            if moved > _MOVED and list(served) == list(was_served):
                raise WeightMismatch(
                    f"The update had no effect on {server}: by the reference it changes the log-probs of a probe by "
                    f"{moved:.3g} nats a token, and what is served is the same as before to the last bit."
                )
        return distance


def mean_abs_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference of two sequences of numbers.

    Raises:
        WeightMismatch: the sequences differ in length.
    """
    if len(one) != len(other):
        raise WeightMismatch(
            f"One side scored {len(one)} tokens of the probe and the other {len(other)}. A reference returns the "
            "log-prob of each id but the first."
        )
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


TrainerLogprobs = Callable[[Sequence[int]], Sequence[float] | Awaitable[Sequence[float]]]
"""Log-probs, at temperature 1, of each of N token ids but the first given those before it: N - 1 numbers."""


async def compute_logprobs(reference: TrainerLogprobs, ids: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probs that a reference computes. A plain function is called on a thread."""
    if inspect.iscoroutinefunction(reference):
        return tuple(await reference(ids))
    found = await run_in_thread(reference, ids)
    return tuple(await found if inspect.isawaitable(found) else found)


def logprobs_of_model(model: PreTrainedModel) -> TrainerLogprobs:
    """Return a reference that uses a transformers model in this process, such as the `model` of an `EmbeddedPolicy`."""
    import torch

    def logprobs(ids: Sequence[int]) -> Sequence[float]:
        row = torch.tensor([list(ids)], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        wanted = row[0, 1:, None]
        numbers: list[float] = logits.log_softmax(-1).gather(1, wanted)[:, 0].tolist()
        return numbers

    return logprobs


def logprobs_of_directory(model: Path, weights: Path | None, adapter: Path | None) -> TrainerLogprobs:
    """Return a reference that loads the model at each call, in float32 on the CPU.

    Args:
        model: the model's directory.
        weights: directory of the weights, if they are elsewhere.
        adapter: directory of a LoRA adapter on top.
    """

    def logprobs(ids: Sequence[int]) -> Sequence[float]:
        found = logprobs_of_model(_load(model, weights, adapter))(ids)
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
