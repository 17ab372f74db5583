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
    """How a model that sees images is shown them: as placeholder tokens, whose places its image encoder fills."""

    @property
    def placeholder(self) -> str:
        """The control token that the model's chat template writes once for each image."""
        ...

    @property
    def reserved_ids(self) -> Collection[int]:
        """The ids that only images may have, so that a model must never sample them."""
        ...

    def ids(self, image: Image) -> Sequence[int]:
        """What stands in place of the template's placeholder for one image: as many ids as the encoder fills.

        Raises:
            UsageError: it is no picture that can be read.
            PrerequisiteError: what reads images is not installed, or the model lacks its settings.
        """
        ...


def image_token_ids(vision: Vision | None) -> tuple[int, ...]:
    """The ids that a model with this vision must not sample."""
    return tuple(vision.reserved_ids) if vision is not None else ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_p: share of probability mass to sample from; 1 samples from all of it.
        top_k: number of most likely tokens to sample from; 0 samples from all of them.
        max_tokens: limit on sampled tokens of one generation.
        stop_ids: token ids that end a generation; the one that was sampled is returned as the last id.
        seed: makes one generation repeatable where the policy can; None draws from the policy's own generator.
        suppressed_ids: token ids that are never sampled, for instance those that stand for images.
        priority: where generations have to wait for one another, those of a higher one go first, if the policy can do
            that. It changes nothing of what is sampled.

    Raises:
        ConfigError: a number is out of its range, or is none.
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
    """What one call of a policy sampled.

    Arrays of NumPy and tensors are taken, and become lists of Python's numbers.

    Attributes:
        ids: sampled token ids, in order, the end-of-turn id included if it was sampled.
        logprobs: per id, its log-prob under the distribution it was sampled from (temperature, cuts and bars applied);
            None where the policy cannot tell, which makes the trajectory untrainable. No id is one that no token has
            (`agentfly.policies.policy`).
        finish_reason: ``stop`` if a stop id was sampled, ``length`` if ``max_tokens`` or the context length cut it.
        version: version of the policy's weights that sampled the tokens; one for each id where they changed meanwhile.
        raw_logprobs: per id, its log-prob at temperature 1, without cuts and bars; None where the policy cannot tell.
    """

    ids: Sequence[int]
    logprobs: Sequence[float] | None
    finish_reason: Literal["stop", "length"]
    version: int | Sequence[int]
    raw_logprobs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        _make_plain(self, "ids", "logprobs", "version", "raw_logprobs")


def _make_plain(generation: object, *names: str) -> None:
    """Have attributes hold Python's own numbers where they are arrays, tensors or scalars of a library's."""
    for name in names:
        value = getattr(generation, name)
        if type(value) is tuple or type(value) is list:
            if value and callable(getattr(value[0], "item", None)):
                object.__setattr__(generation, name, [one.item() if hasattr(one, "item") else one for one in value])
        elif hasattr(value, "dtype"):
            object.__setattr__(generation, name, value.tolist())


class Tokenizer(Protocol):
    """What the rollout layer needs of a tokenizer."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text that follows a control token: nothing in it becomes a control token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; invalid bytes become U+FFFD."""
        ...

    @property
    def vocabulary_ids(self) -> Collection[int]:
        """The ids that a token has. Models may have rows for more, which are padding and stand for no text."""
        ...

    @property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens (those that only a chat format or the model may write), text to id."""
        ...

    @property
    def stripping_tokens(self) -> dict[str, tuple[bool, bool]]:
        """Control tokens that take the white space before or after them along, and which of the two; often none."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids at which the model is to stop, as its tokenizer and its generation settings say; often one or two."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template, the one for conversations with tools; None if it has none."""
        ...

    @property
    def vision(self) -> Vision | None:
        """Which tokens stand for an image; None where the model sees none."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as text, by the model's own chat template, which describes ``tools`` too.

        Raises:
            ChatFormatError: the model has no chat template, or the template refuses the conversation.
        """
        ...


@runtime_checkable
class Policy(Protocol):
    """Token ids in, sampled ids and log-probs out.

    A policy is an object with an owner: it is entered with ``async with`` before it is used, and releases what it
    holds when it is left.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the policy's model."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and sampled together, that a generation can hold."""
        ...

    @property
    def version(self) -> int:
        """How many times the weights have been updated."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample a continuation of ``prompt_ids``; ``images`` are those whose placeholders are among them.

        Calls of one rollout share the ``rollout_id``, so that keys and values of its earlier turns can be kept.
        Cancelling the call stops the sampling.

        Raises:
            PromptTooLong: the prompt leaves no room for one token.
            PolicyError: the generation failed, or the policy takes no images.
        """
        ...

    def release_rollout(self, rollout_id: str) -> None:
        """The rollout has ended: whatever is kept for it may go."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def max_concurrent_generations_of(policy: Policy | ChatPolicy) -> int | None:
    """Return how many generations a policy makes at a time, or None where it does not say.

    A policy says so by an attribute ``max_concurrent_generations``, a whole number or None.
    """
    said = getattr(policy, "max_concurrent_generations", None)
    return said if isinstance(said, int) and said > 0 else None


def enforces_token_limits(policy: object) -> bool:
    """Return whether an agent's limits on tokens apply to a policy.

    They are made for the tokens of a model. A policy whose tokens are others, such as the bytes of a script, says so by
    a true attribute ``ignores_token_limits``, and nothing that it says is cut.
    """
    return not getattr(policy, "ignores_token_limits", False)


@dataclass(frozen=True, slots=True, repr=False)
class ChatGeneration(Brief):
    """What one call of a policy that speaks in messages came to.

    Arrays of NumPy and tensors are taken, as in a `Generation`.

    Attributes:
        content: what was said, without thoughts and calls.
        calls: the tool calls, as the far side read them.
        finish_reason: ``stop`` if the model ended the turn itself, ``length`` if a limit cut it.
        version: version of the policy's weights, 0 where nobody updates them.
        reasoning: the thoughts, where the far side tells them apart.
        prompt_ids, ids, logprobs: the exact tokens, where the far side tells them; without them the trajectory cannot
            be trained on.
        prompt_tokens, sampled_tokens: how many tokens were read and sampled, by the far side's account; None where it
            does not tell.
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
    """Messages in, a message out: for models whose tokens nobody shows. Entered and left as a `Policy` is."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        *,
        rollout_id: str,
    ) -> ChatGeneration:
        """Have the model answer a conversation. Cancelling the call stops it.

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
    """Return the ids that a model must not sample: those that no token has, and those that only images have.

    The output layer of a model often has more rows than its tokenizer has tokens, because matrices of round sizes are
    faster. An id of such padding stands for no text.

    Args:
        tokenizer: the model's.
        rows: how many ids the model's output layer has a logit for.
    """
    known = tokenizer.vocabulary_ids
    of_images = frozenset(image_token_ids(tokenizer.vision))
    return tuple(token_id for token_id in range(rows) if token_id not in known or token_id in of_images)
