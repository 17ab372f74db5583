"""The protocols of policies, their tokenizers and their vision. The rollout layer knows policies by these only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from agentfly.core.errors import ConfigError
from agentfly.core.json_values import Brief
from agentfly.core.messages import Image, Message, PlacedImage, ToolCall
from agentfly.core.numbers import is_finite_number, is_whole, require_number, require_whole


class Vision(Protocol):
    """Shows images to a model, as placeholder tokens that its image encoder fills."""

    @property
    def placeholder(self) -> str:
        """The control token that the model's chat template writes once for each image."""
        ...

    @property
    def reserved_ids(self) -> Collection[int]:
        """The ids that are reserved for images. A model must never sample them."""
        ...

    def ids(self, image: Image) -> Sequence[int]:
        """Return the ids that replace an image's placeholder. Each vector of the image encoder has an id.

        Raises:
            UsageError: the image cannot be read.
            PrerequisiteError: a package for images is not installed, or the model lacks its image settings.
        """
        ...


def image_token_ids(vision: Vision | None) -> tuple[int, ...]:
    """Return the ids that a model with this vision must not sample."""
    return tuple(vision.reserved_ids) if vision is not None else ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the sampling of one generation.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_p: share of probability mass to sample from; 1 samples from all of it.
        top_k: number of most likely tokens to sample from; 0 samples from all of them.
        max_tokens: maximum number of sampled tokens of one generation.
        stop_ids: token ids that end a generation; the sampled one is returned as the last id.
        seed: makes one generation repeatable if the policy supports it; None uses the policy's own random numbers.
        suppressed_ids: token ids that are never sampled, for instance those reserved for images.
        priority: waiting generations of a higher priority start first, if the policy supports it. It does not change
            the sampled tokens.

    Raises:
        ConfigError: a value is not a number or is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    suppressed_ids: tuple[int, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        require_number("SamplingParams", least=0, temperature=self.temperature)
        if not (is_finite_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"SamplingParams(top_p={self.top_p!r}): it must be a number above 0 and at most 1.")
        require_whole("SamplingParams", least=0, top_k=self.top_k)
        require_whole("SamplingParams", max_tokens=self.max_tokens)
        require_whole("SamplingParams", least=None, priority=self.priority)
        if self.seed is not None and not is_whole(self.seed):
            raise ConfigError(f"SamplingParams(seed={self.seed!r}): it must be a whole number, or None.")


@dataclass(frozen=True, slots=True, repr=False)
class Generation(Brief):
    """The tokens that one call of a policy sampled.

    NumPy arrays and tensors are accepted and converted to lists of Python numbers.

    Attributes:
        ids: sampled token ids in order, including the end-of-turn id if it was sampled. Each must have a token; see
            `unsampleable_ids`.
        logprobs: log-prob of each id under the distribution that it was sampled from (after temperature, cuts and
            suppressed ids); None if not known, which makes the trajectory untrainable.
        finish_reason: ``stop`` if a stop id was sampled, ``length`` if ``max_tokens`` or the context length cut it.
        version: version of the weights that sampled the tokens; one per id if they changed meanwhile.
        raw_logprobs: log-prob of each id at temperature 1, without cuts and suppressed ids; None if not known.
    """

    ids: Sequence[int]
    logprobs: Sequence[float] | None
    finish_reason: Literal["stop", "length"]
    version: int | Sequence[int]
    raw_logprobs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        _make_plain(self, "ids", "logprobs", "version", "raw_logprobs")


def _make_plain(generation: object, *names: str) -> None:
    """Convert attributes that are arrays, tensors or scalars of a library to Python numbers."""
    for name in names:
        value = getattr(generation, name)
        if type(value) is tuple or type(value) is list:
            if value and callable(getattr(value[0], "item", None)):
                object.__setattr__(generation, name, [one.item() if hasattr(one, "item") else one for one in value])
        elif hasattr(value, "dtype"):
            object.__setattr__(generation, name, value.tolist())


class Tokenizer(Protocol):
    """The tokenizer interface that the rollout layer uses."""

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text that follows a control token. Nothing in it becomes a control token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included. Invalid bytes become U+FFFD."""
        ...

    @property
    def vocabulary_ids(self) -> Collection[int]:
        """The ids that have a token. Models may have rows for more ids, which are padding and stand for no text."""
        ...

    @property
    def control_tokens(self) -> dict[str, int]:
        """Control tokens (which only a chat format or the model may write) by their text, with their ids."""
        ...

    @property
    def stripping_tokens(self) -> dict[str, tuple[bool, bool]]:
        """Control tokens that strip white space: for each, whether before and whether after it. Often empty."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids at which the model stops, by its tokenizer and its generation settings; often one or two."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template, the one for conversations with tools; None if it has none."""
        ...

    @property
    def vision(self) -> Vision | None:
        """How images are shown to the model; None if it takes none."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render a conversation and the definitions of ``tools`` as text, by the model's own chat template.

        Raises:
            ChatFormatError: the model has no chat template, or the template rejects the conversation.
        """
        ...


@runtime_checkable
class Policy(Protocol):
    """Takes token ids, and returns sampled ids with log-probs.

    Its owner enters a policy with ``async with`` before use. It releases its resources when the block is left.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the policy's model."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in a generation, prompt and sampled tokens together."""
        ...

    @property
    def version(self) -> int:
        """The number of updates of the weights so far."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample a continuation of ``prompt_ids``; ``images`` belong to the placeholders in it.

        Calls of one rollout share the ``rollout_id``, so that keys and values of its earlier turns can be reused.
        Cancelling the call stops the sampling.

        Raises:
            PromptTooLong: the prompt leaves no room for one token.
            PolicyError: the generation failed, or the policy takes no images.
        """
        ...

    def release_rollout(self, rollout_id: str) -> None:
        """Let the policy discard what it keeps for a rollout that has ended."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def max_concurrent_generations_of(policy: Policy | ChatPolicy) -> int | None:
    """Return how many generations a policy makes at a time, or None if it is not known.

    A policy can declare it by an attribute ``max_concurrent_generations``, a whole number or None.
    """
    limit = getattr(policy, "max_concurrent_generations", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def enforces_token_limits(policy: object) -> bool:
    """Return whether an agent's limits on tokens apply to a policy.

    The limits are meant for the tokens of a model. A policy with other tokens, such as the bytes of a script, declares
    this by a true attribute ``ignores_token_limits``. Its turns are then not cut.
    """
    return not getattr(policy, "ignores_token_limits", False)


@dataclass(frozen=True, slots=True, repr=False)
class ChatGeneration(Brief):
    """The answer of a policy that takes and returns messages.

    NumPy arrays and tensors are accepted, as in a `Generation`.

    Attributes:
        content: the text, without reasoning and calls.
        calls: the tool calls, as the endpoint parsed them.
        finish_reason: ``stop`` if the model ended the turn itself, ``length`` if a limit cut it.
        version: version of the policy's weights; 0 if they are never updated.
        reasoning: the reasoning, if the endpoint separates it.
        prompt_ids, ids, logprobs: the exact tokens, if the endpoint reports them. Without them the trajectory cannot be
            trained on.
        prompt_tokens, sampled_tokens: numbers of tokens read and sampled, as the endpoint reports them; else None.
    """

    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "length"]
    version: int = 0
    reasoning: str | None = None
    prompt_ids: Sequence[int] | None = None
    ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None

    def __post_init__(self) -> None:
        _make_plain(self, "prompt_ids", "ids", "logprobs", "version")


@runtime_checkable
class ChatPolicy(Protocol):
    """Takes messages and returns one, for models without visible tokens. Its owner enters it like a `Policy`."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        *,
        rollout_id: str,
    ) -> ChatGeneration:
        """Generate the answer to a conversation. Cancelling the call stops the generation.

        Raises:
            PromptTooLong: the conversation leaves no room for an answer.
            PolicyError: the generation failed.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def unsampleable_ids(tokenizer: Tokenizer, rows: int) -> tuple[int, ...]:
    """Return the ids that a model must not sample: those without a token, and those reserved for images.

    The output layer of a model often has more rows than its tokenizer has tokens, because matrices of round sizes are
    faster. An id of such padding stands for no text.

    Args:
        tokenizer: the model's tokenizer.
        rows: number of rows of the model's output layer.
    """
    known = tokenizer.vocabulary_ids
    of_images = frozenset(image_token_ids(tokenizer.vision))
    return tuple(token_id for token_id in range(rows) if token_id not in known or token_id in of_images)
