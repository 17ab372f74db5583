"""SFTConfig: every setting of a supervised warm start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from agentfly.core.errors import ConfigError
from agentfly.training.config.base import SFT_SETTING_HINTS, SFT_SYNONYMS, BaseConfig
from agentfly.training.config.groups import LoRAConfig


class SFTConfig(BaseConfig):
    """A supervised warm start: the model learns to say what was said in trajectories that won.

    Raises:
        ConfigError: a setting is unknown, out of its range, or contradicts another.
    """

    GROUP: ClassVar[str] = "sft"
    SYNONYMS: ClassVar[Mapping[str, str]] = SFT_SYNONYMS
    SETTING_HINTS: ClassVar[Mapping[str, str]] = SFT_SETTING_HINTS

    min_reward: float = 1.0
    """Trajectories of at least this reward are learned from."""
    max_per_task: PositiveInt | None = None
    """The best so many trajectories of a task are learned from, so that easy tasks do not crowd out others."""
    distinct: bool = True
    """Whether rows of the same tokens count once."""
    tokens: Literal["auto", "sampled", "rendered"] = "auto"
    """Whose ids are learned: the ``sampled`` ones, or those of the conversation ``rendered`` in the model's chat
    format; ``auto`` takes the sampled ones where they are of this model's tokenizer."""
    strategy: Literal["chain", "step"] = "chain"
    """How the turns of a rendered conversation become token sequences."""

    epochs: PositiveInt = 2
    """Number of times that every row is learned from."""
    rows_per_update: PositiveInt = 16
    """Number of rows that an update is made from; their tokens count alike."""
    learning_rate: PositiveFloat = 2e-5
    """Learning rate of AdamW, per update."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up: not at all, or down to 0 after the last update."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the updates over which the learning rate rises linearly to its full value."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW, per update and unit of learning rate."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient's Euclidean norm is scaled down to this."""
    micro_batch_tokens: PositiveInt = 4096
    """Number of tokens scored at once, at most, unless a single row is longer. Bounds memory; changes no number."""
    gradient_checkpointing: bool = False
    """Compute activations twice in place of keeping them: less memory, more time, the same numbers."""
    lora: LoRAConfig | None = None
    """Train adapters in place of all weights; None trains all."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the tasks whose rows are not learned from; the loss on them tells when the model learns by heart."""
    checkpoint_every_updates: PositiveInt | None = None
    """A checkpoint is saved after every so many updates, besides after each epoch."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints kept; older ones are removed."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes the order of the rows, which tasks are held out, and the first weights of adapters."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the model's weights; ``auto`` is float32 on a processor and bfloat16 on a GPU."""
    device: str = "auto"
    """Where the model computes: ``auto``, ``cpu``, ``cuda``, ``cuda:1``."""
    threads: PositiveInt | None = None
    """Number of processor threads; chosen for the machine if not given."""
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    """Conversations of more tokens are left out; as many as the model can hold if not given."""

    @property
    def policy_settings(self) -> dict[str, Any]:
        """The settings of `agentfly.policies.load.load_policy` with which the model is loaded."""
        return {name: getattr(self, name) for name in ("dtype", "device", "threads", "seed", "max_context_tokens")}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens == "sampled" and self.strategy == "step":
            raise ConfigError(
                "sft.strategy=step with sft.tokens=sampled: sampled tokens stand in the sequences they were sampled "
                "in. Leave strategy out."
            )
        return self
