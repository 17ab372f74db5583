"""RenderersFormat: a hand-written chat format from the ``renderers`` package, verified when it is created.

The package (https://pypi.org/project/renderers) has formats of current models with details that no template contains:
how to continue a turn without dropping its reasoning, and how to parse calls. The rules of all formats hold for its
renderings, too: ids only grow, and no text becomes a control token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentfly.core.errors import ChatFormatError, ConfigError, PrerequisiteError, describe_error
from agentfly.core.installation import install_command
from agentfly.core.messages import Message, ToolCall, text_of
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle
from agentfly.formats.chat.chat_format import History, ParsedReply, RenderedTokens, ToolDefinitions, require_no_images
from agentfly.formats.chat.control_tokens import ESCAPE_MARK, ControlTokens
from agentfly.formats.chat.prefix_stability import ProbeExchange, degenerate_exchanges
from agentfly.formats.chat.template_capabilities import PROBE_QUESTION, PROBE_TOOL, split_parallel_calls
from agentfly.formats.chat.template_renderer import PROBE_CALL, PROBE_RESULT, strip_end_of_turn
from agentfly.formats.reasoning import REASONING_MARKERS
from agentfly.formats.toolcalls.tool_call_format import call_id
from agentfly.policies.policy import Tokenizer

NOT_BY_HAND = "default"
"""The package's own fallback, which re-renders by the template; the template-derived format is ours for that."""


def renderer_name(model: str) -> str | None:
    """Return the package's name for a model's format; None if it has none, or is not installed."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return None
    name: str | None = MODEL_RENDERER_MAP.get(model)
    return name


class RenderersFormat:
    """Renders and parses with a hand-written format of the ``renderers`` package.

    Args:
        name: the package's name for the format, such as ``qwen3`` or ``gpt-oss``.
        tokenizer: the policy's tokenizer.
        exchanges: the kinds of turns and answers in the agent's conversations.
        tools: the agent's tools, if the format describes them. It then also parses the calls.
        system: the agent's system message, if it has one.
        history: ``"keep"`` keeps sampled tokens, even if the template would drop old reasoning. ``"rewrite"`` follows
            the template and then begins a new sequence.

    Raises:
        PrerequisiteError: the package, or something that the format needs, is not installed.
        ConfigError: the package has no format of this name.
        ChatFormatError: the format does not fit the tokenizer, drops an answer, cannot continue a turn, or lets a text
            become a control token.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        exchanges: Sequence[ProbeExchange],
        *,
        tools: ToolDefinitions = (),
        system: Message | None = None,
        history: History = "keep",
    ) -> None:
        self.name = name
        self.history = history
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self._tools = [dict(tool) for tool in tools]
        self._renderer = _renderer(name, _TokenizerAdapter(tokenizer, self._control), history)
        self._own_stops = frozenset(self._renderer.get_stop_token_ids())
        self.stop_ids = tuple(dict.fromkeys([*self._renderer.get_stop_token_ids(), *tokenizer.eos_ids]))
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._opening = [*([system] if system else []), PROBE_QUESTION]
        self._one_call = False
        self._last_described: tuple[ToolDefinitions, list[Any]] = ((), [])
        self._marks = self._needs_marks()
        self._require_described(tools)
        self._prompt_ids = list(self.render_prompt(self._opening, tools).ids)
        self._header = self._prompt_ids[len(self._ids_of(self._opening, tools, opens=False)) :]
        header = tokenizer.decode(self._prompt_ids).rstrip()
        self._opened = next((opener for opener in REASONING_MARKERS if header.endswith(opener)), "")
        self._one_call = any(self._refuses(exchange, tools) for exchange in exchanges)
        for exchange in exchanges:
            self._prove(exchange, tools)
        for kind in degenerate_exchanges(exchanges):
            conversation = [*self._opening, kind.turn, *kind.answers, kind.turn, *kind.answers]
            self._require_answers(self._ids_of(conversation, tools), kind)

    def render_prompt(self, messages: Sequence[Message], tools: ToolDefinitions = ()) -> RenderedTokens:
        """Render a whole conversation, ending with the header of the assistant's turn."""
        require_no_images(messages, f"the format {self.name!r} of the renderers package")
        return RenderedTokens(self._ids_of(messages, tools))

    def render_continuation(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[int],
        conversation: Sequence[Message],
        tools: ToolDefinitions = (),
    ) -> RenderedTokens | None:
        """Render the text after a generation; see `ChatFormat.render_continuation`."""
        require_no_images(messages, f"the format {self.name!r} of the renderers package")
        known = list(after)
        split = _end_of_last(self._header, known)
        bridged = self._renderer.bridge_to_next_turn(
            known[:split], known[split:], self._disarmed(messages), tools=self._described(tools)
        )
        if bridged is None:
            if self.history == "rewrite":
                return None
            roles = ", ".join(message["role"] for message in messages)
            raise ChatFormatError(
                f"The format {self.name!r} of the renderers package cannot go on from a turn with messages of the "
                f"roles {roles}. Say Agent(chat_format='template') to use the model's own template."
            )
        ids = list(bridged.token_ids)
        if ids[: len(known)] != known:
            raise ChatFormatError(
                f"The format {self.name!r} of the renderers package changed tokens that were sent or sampled when it "
                "continued the conversation. Set Agent(chat_format='template') to use the model's own template."
            )
        return RenderedTokens(ids[len(known) :])

    def parse_reply(self, ids: Sequence[int]) -> ParsedReply:
        """Parse a generation, with its calls if the format described the tools."""
        generated = strip_end_of_turn(ids, self.stop_ids, self._control_ids)
        text = self._tokenizer.decode(generated)
        known = ids if ids and ids[-1] in self._own_stops else generated
        parsed = self._renderer.parse_response(list(known), tools=self._tools or None, prompt_ids=self._prompt_ids)
        calls = tuple(map(_call, range(len(parsed.tool_calls)), parsed.tool_calls)) if self._tools else None
        return ParsedReply(text, parsed.content, parsed.reasoning_content or None, calls, self._opened)

    def _ids_of(self, messages: Sequence[Message], tools: ToolDefinitions, *, opens: bool = True) -> list[int]:
        shown = self._disarmed(split_parallel_calls(messages) if self._one_call else messages)
        try:
            ids = self._renderer.render_ids(shown, tools=self._described(tools), add_generation_prompt=opens)
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatFormatError(
                f"The format {self.name!r} of the renderers package rejects a conversation of the roles {roles}: "
                f"{describe_error(error)}"
            ) from error
        return list(ids)

    def _disarmed(self, messages: Sequence[Message]) -> list[Any]:
        return list(self._control.escape(messages) if self._marks else messages)

    def _described(self, tools: ToolDefinitions) -> list[Any] | None:
        if not self._marks:
            return [dict(tool) for tool in tools] or None
        known, described = self._last_described
        if tools is not known:
            described = self._control.escape_tools(tools)
            self._last_described = (tools, described)
        return described or None

    def _needs_marks(self) -> bool:
        """Return whether control tokens in text must be escaped. Some formats encode them as text themselves."""
        spelled = "".join(f"{token} text " for token in self._tokenizer.control_tokens)
        samples = [pair for pair in zip(_samples("text"), _samples(spelled), strict=True) if self._can_write(pair[0])]
        for marks in (False, True):
            self._marks = marks
            if all(self._controls_in(plain) == self._controls_in(evil) for plain, evil in samples):
                break
        else:
            raise ChatFormatError(
                f"The format {self.name!r} of the renderers package lets text become control tokens. Say "
                "Agent(chat_format='template') to use the model's own template."
            )
        if any(
            ESCAPE_MARK in self._tokenizer.decode(self._ids_of(messages, tools)) for _, (messages, tools) in samples
        ):
            raise ChatFormatError(f"The format {self.name!r} of the renderers package writes what no text held.")
        return marks

    def _can_write(self, sample: tuple[list[Message], ToolDefinitions]) -> bool:
        self._marks = False
        try:
            self._ids_of(*sample)
        except ChatFormatError:
            return False
        return True

    def _controls_in(self, sample: tuple[list[Message], ToolDefinitions]) -> list[int]:
        return [one for one in self._ids_of(*sample) if one in self._control_ids]

    def _require_described(self, tools: ToolDefinitions) -> None:
        """Check that the prompt describes the tools.

        Raises:
            ChatFormatError: it does not.
        """
        text = self._tokenizer.decode(self._ids_of(self._opening, tools))
        missing = [name for tool in tools if (name := str(tool["function"]["name"])) not in text]
        if missing:
            raise ChatFormatError(
                f"The format {self.name!r} of the renderers package does not describe tools, so the model would not "
                f"know of {missing[0]!r}. Name a tool-call format that describes them, for instance 'hermes'."
            )

    def _prove(self, exchange: ProbeExchange, tools: ToolDefinitions) -> None:
        """Check that the format can continue after a turn that it has written itself.

        Raises:
            ChatFormatError: an answer is not rendered, or the format cannot continue.
        """
        after = [*self._prompt_ids, *self._as_sampled(exchange.turn, tools)]
        conversation = [*self._opening, exchange.turn, *exchange.answers]
        following = self.render_continuation(exchange.answers, after=after, conversation=conversation, tools=tools)
        self._require_answers(following.ids if following else self._ids_of(conversation, tools), exchange)

    def _require_answers(self, ids: Sequence[int], exchange: ProbeExchange) -> None:
        text = self._tokenizer.decode(ids)
        for answer in exchange.answers:
            if text_of(answer["content"]) not in text:
                raise ChatFormatError(
                    f"The format {self.name!r} of the renderers package leaves out messages of the role "
                    f"{answer['role']!r}. Use a tool-call format whose results it supports, for instance 'model'."
                )

    def _refuses(self, exchange: ProbeExchange, tools: ToolDefinitions) -> bool:
        """Return whether the format rejects a turn with several calls and its answers."""
        if len(exchange.turn.get("tool_calls", ())) < 2:
            return False
        try:
            self._ids_of([*self._opening, exchange.turn, *exchange.answers], tools)
        except ChatFormatError:
            return True
        return False

    def _as_sampled(self, turn: Message, tools: ToolDefinitions) -> list[int]:
        """Return the ids that the model would sample for a turn, as far as the format shows them."""
        thinking: Message = {**turn, "reasoning_content": "thought"}
        for reply in (turn, thinking):
            try:
                ids = self._ids_of([*self._opening, reply], tools, opens=False)
            except ChatFormatError:
                continue  # some formats cannot write parallel calls as history, and go on from them all the same
            if ids[: len(self._prompt_ids)] == self._prompt_ids:
                sampled = ids[len(self._prompt_ids) :]
                ends = [at for at, one in enumerate(sampled) if one in self.stop_ids]
                return sampled[: ends[-1] + 1] if ends else sampled
        return [self.stop_ids[0]]


class _TokenizerAdapter:
    """The tokenizer interface of the package. Control tokens in the text that it encodes are the format's own."""

    unk_token_id = None
    name_or_path = ""

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self.eos_token_id = next(iter(tokenizer.eos_ids), None)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Encode a part of a rendered conversation."""
        return self._control.encode(text)

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        """Decode ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a control token, or the ids of several; None for any other text."""
        if isinstance(tokens, str):
            return self._tokenizer.control_tokens.get(tokens)
        return [self._tokenizer.control_tokens.get(token) for token in tokens]


def _renderer(name: str, encoder: _TokenizerAdapter, history: History) -> Any:
    try:
        from renderers import config_from_name, create_renderer
    except ImportError as error:
        raise PrerequisiteError(
            f"Agent(chat_format='renderers…') needs the renderers package: {install_command('renderers')}."
        ) from error
    if name == NOT_BY_HAND:
        raise ConfigError("The format 'default' of the renderers package is no format of a model. Say 'template'.")
    try:
        config = config_from_name(name)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"The renderers package has no format {name!r}: {error}") from error
    if config is None:
        raise ConfigError("Agent(chat_format='renderers:auto'): say which format, or just chat_format='renderers'.")
    if history == "keep":
        config = type(config).model_validate({**config.model_dump(exclude_unset=True), "thinking_retention": "all"})
    try:
        return create_renderer(encoder, config)
    except AssertionError as error:
        raise ChatFormatError(
            f"The format {name!r} of the renderers package does not fit this model's tokenizer: {error}."
        ) from error
    except Exception as error:
        raise PrerequisiteError(
            f"The format {name!r} of the renderers package cannot be used: {describe_error(error)}"
        ) from error


def _end_of_last(header: list[int], ids: list[int]) -> int:
    """Return the start of the last turn: the position after the last header."""
    for start in range(len(ids) - len(header), -1, -1):
        if ids[start : start + len(header)] == header:
            return start + len(header)
    return len(ids) - 1


def _samples(text: str) -> list[tuple[list[Message], ToolDefinitions]]:
    """Return conversations with a text at each position that the format does not write itself, each with its tools."""
    reply: Message = {"role": "assistant", "content": "answer"}
    question: Message = {"role": "user", "content": text}
    function = {"name": "stand_in_tool", "arguments": {"argument": [text]}}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [{**PROBE_CALL, "function": function}]}
    described = {**PROBE_TOOL["function"], "description": text}
    return [
        ([PROBE_QUESTION, reply, question], ()),
        ([{"role": "system", "content": text}, PROBE_QUESTION], ()),
        ([PROBE_QUESTION], [{"type": "function", "function": described}]),
        ([PROBE_QUESTION, calls, {**PROBE_RESULT, "content": text}], [PROBE_TOOL]),
    ]


def _call(number: int, parsed: Any) -> ToolCall:
    """Convert a call that the package has parsed. An incomplete call carries an error and is never executed."""
    status, arguments, name = str(parsed.status), parsed.arguments, parsed.name or ""
    try:
        arguments = json.loads(arguments) if status == "ok" and isinstance(arguments, str) else arguments
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # no JSON, not finite, or half of a surrogate pair
        status = "invalid_json"
    if status in ("ok", "unknown_tool") and name and isinstance(arguments, dict):
        return ToolCall(call_id(number), name, arguments)
    reason = status.replace("_", " ") if status != "ok" else "its arguments are no JSON object"
    return ToolCall(
        call_id(number),
        name,
        None,
        f"This tool call was not executed, because it cannot be read: {reason}. You wrote: "
        f"{truncate_middle(parsed.raw.strip(), MAX_ECHO_CHARS)}",
    )
