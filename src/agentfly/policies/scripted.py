"""ScriptedPolicy: answers given in advance, for tests, oracles, benches and demonstrations without a model."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from agentfly.core.errors import ConfigError, PolicyError, PromptTooLong
from agentfly.core.messages import Content, Image, Message, PlacedImage, text_of
from agentfly.core.numbers import is_finite_number, require_whole
from agentfly.policies.policy import Generation, SamplingParams

Script = Callable[[str, int], str | Awaitable[str]]


class ByteVision:
    """Images for `ByteTokenizer`: one placeholder for each 16 bytes of the file."""

    placeholder = "<|image|>"
    reserved_ids = (258,)

    def ids(self, image: Image) -> Sequence[int]:
        """Return the placeholders of an image."""
        return self.reserved_ids * max(1, len(image.data) // 16)


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8, followed by the control tokens of ChatML.

    Args:
        sees: whether it supports images.
    """

    control_tokens = {"<|im_start|>": 256, "<|im_end|>": 257, ByteVision.placeholder: 258}
    stripping_tokens: dict[str, tuple[bool, bool]] = {}
    eos_ids = (257,)
    chat_template = "{# ChatML; tools and tool_calls, one a line as JSON #}"

    vision: ByteVision | None = None

    def __init__(self, *, sees: bool = False) -> None:
        if sees:
            self.vision = ByteVision()

    @property
    def vocabulary_ids(self) -> range:
        """The bytes, and the control tokens after them."""
        return range(max(self.control_tokens.values()) + 1)

    def encode_text(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes, with control tokens as text."""
        characters = "".join(map(chr, ids))
        for token, control_id in self.control_tokens.items():
            characters = characters.replace(chr(control_id), token)
        return characters.encode("latin-1").decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render a conversation in ChatML. Calls and tools are JSON lines; the tools form a system message."""
        described: list[Message] = [{"role": "system", "content": "\n".join(map(json.dumps, tools))}] if tools else []
        turns = [
            f"<|im_start|>{message['role']}\n{self._content(message['content'])}{_calls(message)}<|im_end|>\n"
            for message in [*described, *messages]
        ]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _content(self, content: Content) -> str:
        if isinstance(content, str) or self.vision is None:
            return text_of(content)
        return "".join(part["text"] if part["type"] == "text" else self.vision.placeholder for part in content)


def _calls(message: Message) -> str:
    return "".join(f"\n{json.dumps(call['function'], ensure_ascii=False)}" for call in message.get("tool_calls", ()))


class ScriptedPolicy:
    """A policy whose generations are given in advance.

    Args:
        script: the texts of a rollout's turns in order, the same for every rollout. Or a sync or async function of the
            prompt as text and the turn's number (from 0) that returns the text of the turn. The prompt is the whole
            conversation so far, as a model would see it.
        seconds: duration of a generation, or a function of rollout id and turn that returns it.
        context_length: maximum number of tokens in a generation, prompt included. A token is a byte.
        sees: whether it takes images; an image has a token for each 16 bytes of its file.
        limited: whether the agent's token limits apply to the script, whose tokens are bytes. They are meant for the
            tokens of a model, so by default they do not. Set it to test the limits.

    Raises:
        ConfigError: ``script`` is neither a list of texts nor a function.
    """

    def __init__(
        self,
        script: Sequence[str] | Script,
        *,
        seconds: float | Callable[[str, int], float] = 0.0,
        context_length: int = 1_000_000,
        sees: bool = False,
        limited: bool = False,
    ) -> None:
        if not callable(script):
            words = isinstance(script, Sequence) and not isinstance(script, (str, bytes))
            if not words or not all(isinstance(text, str) for text in script):
                raise ConfigError(
                    f"ScriptedPolicy({script!r:.100}): it must be a list of texts, one for each turn, or a function of "
                    "prompt and turn."
                )
        if not callable(seconds) and not (is_finite_number(seconds) and seconds >= 0):
            raise ConfigError(
                f"ScriptedPolicy(seconds={seconds!r}): it must be a finite number of at least 0, or a function of "
                "rollout id and turn."
            )
        require_whole("ScriptedPolicy", context_length=context_length)
        self.tokenizer = ByteTokenizer(sees=sees)
        self.context_length = context_length
        self.version = 0
        self.ignores_token_limits = not limited
        self._script = script
        self._seconds = seconds
        self._turns: dict[str, int] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Return the script's text for the rollout's next turn, with the end-of-turn id. Log-probs are 0."""
        room = min(sampling.max_tokens, self.context_length - len(prompt_ids))
        if room < 1:
            raise PromptTooLong(f"The prompt of {len(prompt_ids)} tokens fills the context of {self.context_length}.")
        turn = self._turns.get(rollout_id, 0)
        self._turns[rollout_id] = turn + 1
        seconds = self._seconds(rollout_id, turn) if callable(self._seconds) else self._seconds
        if seconds:
            await asyncio.sleep(seconds)
        text = await self._text(prompt_ids, turn)
        ids = [*self.tokenizer.encode_text(text), *self.tokenizer.eos_ids]
        cut = ids[:room]
        finish: Literal["stop", "length"] = "stop" if len(cut) == len(ids) else "length"
        return Generation(cut, [0.0] * len(cut), finish, self.version, [0.0] * len(cut))

    def release_rollout(self, rollout_id: str) -> None:
        """Forget the rollout's turn."""
        self._turns.pop(rollout_id, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.clear()

    async def _text(self, prompt_ids: Sequence[int], turn: int) -> str:
        if callable(self._script):
            text = self._script(self.tokenizer.decode(prompt_ids), turn)
            return await text if inspect.isawaitable(text) else text
        if turn >= len(self._script):
            raise PolicyError(
                f"The script has {len(self._script)} turns, and turn {turn + 1} was requested. "
                "Add a last text without a tool call, so that the rollout ends."
            )
        return self._script[turn]
