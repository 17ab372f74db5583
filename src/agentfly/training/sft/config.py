"""SFTConfig: every setting of a supervised warm start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from agentfly.core.errors import ConfigError
from agentfly.training.config.base import SFT_SETTING_HINTS, SFT_SYNONYMS, BaseConfig
from agentfly.training.config.groups import LoRAConfig


class SFTConfig(BaseConfig):
    """A supervised warm start: the model is trained on the turns of successful trajectories.

    Raises:
        ConfigError: a setting is unknown, out of its range, or contradicts another.
    """

    GROUP: ClassVar[str] = "sft"
    SYNONYMS: ClassVar[Mapping[str, str]] = SFT_SYNONYMS
    SETTING_HINTS: ClassVar[Mapping[str, str]] = SFT_SETTING_HINTS

    min_reward: float = 1.0
    """Minimum reward of the trajectories that are trained on."""
    max_per_task: PositiveInt | None = None
    """Maximum number of trajectories per task; the best are taken. Prevents easy tasks from dominating. None for no
    limit."""
    distinct: bool = True
    """Whether rows with the same tokens count once."""
    tokens: Literal["auto", "sampled", "rendered"] = "auto"
    """Which ids are trained on: the ``sampled`` ones, or those of the conversation ``rendered`` in the model's chat
    format. ``auto`` takes the sampled ids if they belong to this model's tokenizer."""
    strategy: Literal["chain", "step"] = "chain"
    """How the turns of a rendered conversation become token sequences."""

    epochs: PositiveInt = 2
    """Number of passes over all rows."""
    rows_per_update: PositiveInt = 16
    """Number of rows per update. All their tokens have the same weight."""
    learning_rate: PositiveFloat = 2e-5
    """Learning rate of AdamW, per update."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning-rate schedule after the warm-up: constant, or falling to 0 after the last update."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the updates over which the learning rate rises linearly to its full value."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW, per update and unit of learning rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum Euclidean norm of the gradient; a larger gradient is scaled down."""
    micro_batch_tokens: PositiveInt = 4096
    """Maximum number of tokens per forward pass; a longer single row gets its own pass. Bounds memory and changes no
    result."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same results."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters. None trains all weights."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the tasks whose rows are held out. A rising loss on them shows overfitting."""
    checkpoint_every_updates: PositiveInt | None = None
    """Number of updates between checkpoints. A checkpoint is also saved after each epoch."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints kept; older ones are removed."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the order of rows, of the choice of held-out tasks, and of the initial adapters."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the model's weights. ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    device: str = "auto"
    """Device of the model: ``auto``, ``cpu``, ``cuda``, ``cuda:1``."""
    threads: PositiveInt | None = None
    """Number of CPU threads. None chooses a number for the machine."""
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a conversation; longer ones are left out. None for the model's maximum."""

    @property
    def policy_settings(self) -> dict[str, Any]:
        """The settings of `agentfly.policies.load.load_policy` with which the model is loaded."""
        return {name: getattr(self, name) for name in ("dtype", "device", "threads", "seed", "max_context_tokens")}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens == "sampled" and self.strategy == "step":
            raise ConfigError(
                "sft.strategy=step with sft.tokens=sampled: sampled tokens stay in the sequences in which they were "
                "sampled. Leave strategy out."
            )
        return self
