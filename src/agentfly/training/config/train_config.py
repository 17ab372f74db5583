"""TrainConfig: all settings of a training run. Settings without an effect are rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from agentfly.core.errors import ConfigError
from agentfly.core.registry import Registry
from agentfly.training.advantages import ALGORITHMS, Algorithm
from agentfly.training.config.base import SETTING_HINTS, SYNONYMS, BaseConfig
from agentfly.training.config.groups import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    DynamicSamplingConfig,
    EarlyStopConfig,
    KLConfig,
    LoRAConfig,
    OverlongConfig,
)
from agentfly.training.losses import LOSSES, PolicyLoss
from agentfly.training.trackers import TRACKERS

LOSS_SETTINGS = ("clip_low", "clip_high", "clip_dual")
"""The settings that a loss receives. An algorithm receives those below ``advantage``."""


def reject_unused_settings(config: TrainConfig) -> None:
    """Raise if a setting differs from its default but has no effect with the other settings.

    Raises:
        ConfigError: there is such a setting. The message names an alternative.
    """
    unused = {**_unused_by_algorithm(config), **_unused_by_loss(config), **_unused_by_other_settings(config)}
    complaints = [
        f"{name}={_as_written(value)}: {unused[name]}" for name, value in changed_settings(config) if name in unused
    ]
    if complaints:
        raise ConfigError("\n".join(complaints))


def changed_settings(settings: BaseConfig, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults, including settings of groups with a default."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            yield within + name, value
            if isinstance(value, BaseConfig) and isinstance(field.default, BaseConfig):
                yield from changed_settings(value, f"{name}.")


def _unused_by_algorithm(config: TrainConfig) -> dict[str, str]:
    """Return the settings that the algorithm does not read, with alternatives."""
    name, algorithm = config.algorithm, config.chosen_algorithm
    unused = {}
    for setting in type(config.advantage).model_fields:
        if setting not in algorithm.uses:
            remedy = algorithm.unused_setting_hints.get(setting) or _suggest(
                other for other in ALGORITHMS if setting in ALGORITHMS[other].uses
            )
            unused[f"advantage.{setting}"] = f"algorithm={name} does not use it. {remedy}"
    if not algorithm.needs_critic:
        users = ", ".join(other for other in ALGORITHMS if ALGORITHMS[other].needs_critic)
        for setting in type(config.critic).model_fields:
            unused[f"critic.{setting}"] = (
                f"algorithm={name} has no critic. Choose one that has ({users}), or leave it out."
            )
    return unused


def _unused_by_loss(config: TrainConfig) -> dict[str, str]:
    """Return the settings that the loss does not read, with alternatives."""
    return {
        setting: f"loss={config.loss} does not use it. "
        + _suggest(other for other in LOSSES if setting in LOSSES[other].uses)
        for setting in LOSS_SETTINGS
        if setting not in config.chosen_loss.uses
    }


def _unused_by_other_settings(config: TrainConfig) -> dict[str, str]:
    """Return the settings that other settings make ineffective, with alternatives."""
    unused = {}
    if config.advantage.anchor_match == "exact":
        unused["advantage.anchor_similarity"] = (
            "advantage.anchor_match=exact compares no texts. Set advantage.anchor_match=similar, or leave it out."
        )
    if config.advantage.step_weight == 0:
        for setting in ("step_discount", "anchor_match"):
            unused[f"advantage.{setting}"] = (
                "advantage.step_weight=0 removes its effect. Raise step_weight, or leave this out."
            )
    if config.kl.coefficient == 0:
        for setting in ("where", "estimator", "gradient"):
            unused[f"kl.{setting}"] = (
                "kl.coefficient=0 measures no divergence. Set kl.coefficient, such as 0.01, or leave this out."
            )
    if config.kl.target_nats is None:
        unused["kl.horizon_rows"] = "it is for the coefficient that kl.target_nats adapts. Set that, or leave this out."
    if config.schedule == "constant":
        unused["min_learning_rate_ratio"] = (
            "with schedule=constant the learning rate does not fall. Set schedule=linear or cosine, or leave this out."
        )
    if config.early_stop is None and not config.keep_best:
        unused["eval_metric"] = "only keep_best and early_stop look at it. Set one of them, or leave this out."
    return unused


def _suggest(users: Iterator[str]) -> str:
    return f"Choose one that does ({', '.join(users)}), or leave it out."


def _as_written(value: Any) -> str:
    """Return a value as it is written in a configuration file."""
    return str(value).lower() if isinstance(value, bool) else str(value)


Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class OwnCode:
    """The validation context of settings that may name code by reference, as in a configuration file.

    Each configuration holds what its references name. Nothing is registered, so that the same reference may name
    different things in configurations of different directories.

    Attributes:
        load: gives what a reference names, for a field.
    """

    load: Callable[[str, str], Any]


class TrainConfig(BaseConfig):
    """Every setting of a training run.

    Raises:
        ConfigError: a setting is unknown, out of its range, or contradicts another.
    """

    SYNONYMS: ClassVar[Mapping[str, str]] = SYNONYMS
    SETTING_HINTS: ClassVar[Mapping[str, str]] = SETTING_HINTS

    algorithm: str = "grpo"
    """How advantages are estimated from rewards: a name in `agentfly.training.advantages.ALGORITHMS`. In a file also a
    reference to an `Algorithm`, as ``module:name`` or ``path/file.py:name``."""
    loss: str = "ppo_clip"
    """The policy loss: a name in `agentfly.training.losses.LOSSES`. In a file also a reference, as for
    ``algorithm``."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_token_mean", "constant"] = "token_mean"
    """How the losses of tokens are averaged: over all tokens of a batch (``token_mean``); over the rows, of each row's
    sum (``sequence_mean``) or mean (``sequence_token_mean``); or the sum over all tokens, divided by
    ``aggregation_tokens`` and the number of rows (``constant``, as in Dr.GRPO)."""
    aggregation_tokens: PositiveInt | None = None
    """Divisor of a row's sum under ``constant``: the maximum number of tokens of a row."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Settings of the algorithm."""
    correction: CorrectionConfig | None = None
    """Importance weights for the difference between the trainer's and the sampler's log-probs. None uses no weights,
    and the ratio refers to the sampler's log-probs."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replaces groups without a learning signal by other tasks. None keeps all groups."""
    overlong: OverlongConfig | None = None
    """A penalty on long trajectories. None for no penalty."""
    max_row_tokens: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a row; longer rows are truncated. None for no limit."""

    strategy: Literal["chain", "step"] = "chain"
    """How turns become token sequences: ``chain`` has one that grows with the conversation, ``step`` one per turn."""

    steps: PositiveInt = 100
    """Number of steps. Each step rolls out a batch and learns from it."""
    tasks_per_step: PositiveInt = 8
    """Number of tasks in a step."""
    max_staleness: NonNegativeInt = 0
    """Maximum number of weight updates between the start of a rollout and the update that trains it. With 0, rollouts
    and updates alternate, and every token is trained by the weights that sampled it."""
    attempts: PositiveInt = 8
    """Number of rollouts per task and step: the group size."""
    temperature: PositiveFloat | None = None
    """Divides the logits in training rollouts and in scoring. None uses the agent's temperature."""

    learning_rate: PositiveFloat = 1e-5
    """Learning rate of AdamW, per update."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up: constant, or falling to ``min_learning_rate_ratio``."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that remains after the last step of a falling schedule."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises linearly to its full value."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW, per update and unit of learning rate, on matrices."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's running means of the gradient and of its square, per update: beta 1 and beta 2."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the square root of AdamW's mean of squares."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum Euclidean norm of the gradient; a larger gradient is scaled down."""
    updates_per_step: PositiveInt = 1
    """Number of passes over each batch (epochs)."""
    mini_batches: PositiveInt = 1
    """Number of parts of whole trajectories into which a batch is divided. Each part makes one update, so a step makes
    ``updates_per_step`` times as many."""
    micro_batch_tokens: PositiveInt = 4096
    """Maximum number of tokens per forward pass; a longer single row gets its own pass. Bounds memory and changes no
    result."""
    clip_low: NonNegativeFloat = 0.2
    """Lower clipping bound: the probability ratio of a token is clipped at 1 minus this. 1 for no bound."""
    clip_high: NonNegativeFloat = 0.28
    """Upper clipping bound: the probability ratio of a token is clipped at 1 plus this."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: for a negative advantage, the loss of a token is at most this many times the advantage. None for no
    limit."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, in nats per token."""
    kl: KLConfig = KLConfig()
    """A penalty on the divergence from the policy before training."""

    lora: LoRAConfig | None = None
    """Train low-rank adapters. None trains all weights."""
    critic: CriticConfig = CriticConfig()
    """The value model, for algorithms that need one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass (activation checkpointing): less memory, more time, the same
    results."""

    eval_every_steps: PositiveInt | None = None
    """Number of steps between evaluations. Evaluations also run before the first step and after the last."""
    eval_attempts: PositiveInt = 1
    """Number of rollouts per held-out task in an evaluation."""
    eval_temperature: NonNegativeFloat = 0.0
    """Divides the logits in evaluations; 0 takes the most likely token."""

    eval_metric: str = "reward/mean"
    """Evaluation metric that ``early_stop`` and ``keep_best`` use; higher is better."""
    early_stop: EarlyStopConfig | None = None
    """Conditions under which evaluations end the run early. None for none."""

    checkpoint_every_steps: PositiveInt = 10
    """Number of steps between checkpoints. A checkpoint is also saved after the last step."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints kept; older ones are removed."""
    keep_best: bool = False
    """Whether to also keep a checkpoint of the step with the best evaluation. The link ``checkpoints/best`` points to
    it."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers that receive the metrics in addition to ``metrics.jsonl``: names in
    `agentfly.training.trackers.TRACKERS`, such as ``tensorboard``, ``wandb``, ``mlflow`` and ``trackio``."""
    project: str = "agentfly"
    """Name of the project in the trackers (in MLflow, of the experiment)."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the task order and, if the trainer loads the policy, of sampling."""
    max_concurrent_rollouts: PositiveInt | None = None
    """Maximum number of concurrent rollouts. None chooses a number that keeps the policy busy and fits into memory."""
    max_concurrent_starts: PositiveInt | None = None
    """Maximum number of resources, such as sandboxes, that start at once. Starts that keep a processor or a daemon busy
    count more than once. None for 8 per processor core."""
    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops if more than this share of a batch's rollouts fail as infrastructure."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights of a policy that the trainer loads. ``auto`` is bfloat16 on a GPU and float32 on a
    CPU. In float32, log-probs of sampling and training agree."""
    device: str = "auto"
    """Device of a policy that the trainer loads: ``auto``, ``cpu``, ``cuda``, ``cuda:1``."""
    threads: PositiveInt | None = None
    """Number of CPU threads of a policy that the trainer loads. None chooses a number for the machine."""
    max_concurrent_generations: PositiveInt = 64
    """Maximum number of concurrent generations. Keys and values of twice as many sequences are kept. Bounds memory."""
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a sequence, prompt and sampled. None for the model's maximum."""

    @property
    def policy_settings(self) -> dict[str, Any]:
        """The settings of `agentfly.policies.load.load_policy` for a policy that is not given."""
        names = ("dtype", "device", "threads", "seed", "max_concurrent_generations", "max_context_tokens")
        return {name: getattr(self, name) for name in names}

    _own: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """Load what the settings name by reference; see `OwnCode`."""
        if isinstance(context, OwnCode):
            registries: dict[str, Registry[Any]] = {"algorithm": ALGORITHMS, "loss": LOSSES}
            for field, registry in registries.items():
                reference = getattr(self, field)
                if ":" in reference and reference not in registry:
                    self._own[reference] = context.load(reference, field)
                    registry.require_type(reference, self._own[reference])

    @property
    def chosen_algorithm(self) -> Algorithm:
        """The algorithm that ``algorithm`` names."""
        own: Algorithm | None = self._own.get(self.algorithm)
        return ALGORITHMS[self.algorithm] if own is None else own

    @property
    def chosen_loss(self) -> PolicyLoss:
        """The policy loss that ``loss`` names."""
        own: PolicyLoss | None = self._own.get(self.loss)
        return LOSSES[self.loss] if own is None else own

    def replaced(self, settings: Mapping[str, Any]) -> TrainConfig:
        """These settings, with some replaced.

        Raises:
            ConfigError: a setting is unknown, out of its range, or contradicts another.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        changes = self.canonical(settings)
        for name in changes.keys() - settings.keys():  # of a group under another name, such as beta, the rest stays
            if isinstance(held := getattr(self, name, None), BaseConfig):
                changes[name] = {one: getattr(held, one) for one in held.model_fields_set} | changes[name]
        kept = OwnCode(lambda reference, field: self._own[reference])
        return TrainConfig.model_validate({**given, **changes}, context=kept if self._own else None)

    @field_validator("trackers", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """Accept one name, or several with commas, as other frameworks do."""
        if not isinstance(value, str):
            return value
        return tuple(name for name in map(str.strip, value.split(",")) if name and name != "none")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        algorithm = self.chosen_algorithm
        for tracker in self.trackers:
            TRACKERS[tracker]  # raises for an unknown name
        self.chosen_loss  # noqa: B018  # raises for an unknown name
        if self.attempts < algorithm.min_attempts:
            raise ConfigError(
                f"attempts={self.attempts}: {self.algorithm} compares the attempts at a task, so it learns "
                f"nothing from a group of fewer than {algorithm.min_attempts}. Raise attempts, or choose "
                "another algorithm."
            )
        if self.dynamic_sampling is not None and not algorithm.supports_dynamic_sampling:
            raise ConfigError(
                f"dynamic_sampling with algorithm={self.algorithm}, which also learns from groups with equal "
                "scores: they would be dropped. Leave dynamic_sampling out, or choose an algorithm that compares the "
                "attempts at a task, such as grpo. (For your own Algorithm, set "
                "supports_dynamic_sampling=True.)"
            )
        if self.dynamic_sampling is not None and self.kl.coefficient > 0 and self.kl.where == "reward":
            raise ConfigError(
                "dynamic_sampling with kl.where=reward: the penalty differs between attempts with equal scores. Their "
                "group has a learning signal, but would be dropped. Set kl.where=loss."
            )
        if self.clip_low > 1.0:
            raise ConfigError(f"clip_low={self.clip_low}: ratios are never below 0; set clip_low=1 for no lower bound.")
        if (self.aggregation == "constant") != (self.aggregation_tokens is not None):
            raise ConfigError(
                f"aggregation={self.aggregation} with aggregation_tokens={self.aggregation_tokens}: only "
                "aggregation=constant divides by a number of tokens. Set both, or neither."
            )
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is more than steps={self.steps}: the learning rate would never "
                "reach learning_rate. Lower warmup_steps."
            )
        if algorithm.needs_critic and self.critic.warmup_steps >= self.steps:
            raise ConfigError(
                f"critic.warmup_steps={self.critic.warmup_steps} with steps={self.steps}: only the critic "
                "would be trained until the last step, and the policy never. Lower critic.warmup_steps."
            )
        if self.early_stop is not None and self.eval_every_steps is None:
            raise ConfigError(
                "early_stop needs evaluations, and there are none between the first and the last step. Set "
                "eval_every_steps."
            )
        reject_unused_settings(self)
        if self.eval_attempts > 1 and self.eval_temperature == 0.0:
            raise ConfigError(
                f"eval_attempts={self.eval_attempts} with eval_temperature=0: at temperature 0 all attempts at a task "
                "are the same. Set eval_attempts=1, or eval_temperature above 0."
            )
        return self
