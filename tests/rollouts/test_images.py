"""Images in rollouts: an image and its placeholder tokens are kept or cut together."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentfly as af
from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import Image, Message, PlacedImage
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import FinishReason, Trajectory
from agentfly.formats.chat.chat_format import RenderedTokens
from agentfly.formats.chat.prefix_stability import ProbeExchange
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.policies.policy import ChatGeneration, Generation
from agentfly.policies.scripted import ByteTokenizer, ByteVision
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.token_recorder import TokenRecorder

PIXEL = ByteVision.reserved_ids[0]
IM_END = 257


PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGM4wcUFAAJ6AN1nJ0J9AAAAAElFTkSuQmCC")
"""A picture of one pixel."""


def image(tokens: int, fill: bytes = b"i") -> Image:
    """An image that takes so many tokens of a scripted policy; a real one from 5 tokens on."""
    return Image((PNG + fill * 16 * tokens if tokens > 4 else fill * 16 * tokens)[: 16 * tokens])


def with_images(*images: Image, text: str = "look", role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "content": [{"type": "text", "text": text}, *({"type": "image", "image": one} for one in images)],
    }


@af.tool
def photograph() -> af.ToolResult:
    """Take a photograph."""
    return af.ToolResult("a cat", image=image(20))


class Seen(af.ScriptedPolicy):
    """Keeps what it was sent."""

    def __init__(self, script: list[str], **how: Any) -> None:
        super().__init__(script, sees=True, limited=True, **how)
        self.sent: list[tuple[list[int], list[PlacedImage]]] = []

    async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
        self.sent.append((list(prompt_ids), list(images)))
        self.barred = sampling.suppressed_ids
        return await super().generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)


def call(agent: af.Agent) -> str:
    return agent.format.write("photograph", {})


def require_both_or_neither(ids: Any, images: Any) -> None:
    """Every placeholder is an image's, and every image has all of its own."""
    spans = [place for placed in images for place in range(placed.start, placed.stop)]
    assert spans == [at for at, one in enumerate(ids) if one == PIXEL]
    assert all(placed.stop - placed.start == max(1, len(placed.image.data) // 16) for placed in images)


async def rollout(policy: Any, task: Any, **how: Any) -> Trajectory:
    agent = af.Agent(model="m", tools=[photograph], **how)
    [trajectory] = (await af.run(agent, [task], policy=policy)).trajectories
    return trajectory


@pytest.fixture
def agent() -> af.Agent:
    return af.Agent(model="m", tools=[photograph])


# --- in whole rollouts ------------------------------------------------------------------------------------------------


async def test_images_of_the_task_and_of_tools_reach_the_policy_in_their_places(agent: af.Agent) -> None:
    policy = Seen([call(agent), "two pictures"])
    trajectory = await rollout(policy, af.Task([with_images(image(9), image(5))]))  # type: ignore[list-item]
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert [len(images) for _, images in policy.sent] == [2, 3]
    for ids, images in policy.sent:
        require_both_or_neither(ids, images)
    [sequence] = trajectory.sequences
    require_both_or_neither(sequence.ids, sequence.images)
    assert [placed.image for placed in sequence.images] == [image(9), image(5), image(20)]
    assert policy.barred == (PIXEL,)
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


@pytest.mark.parametrize("room", range(0, 60, 4))
async def test_an_observation_that_does_not_fit_is_cut_with_its_image_or_before_it(agent: af.Agent, room: int) -> None:
    whole = await rollout(policy := Seen([call(agent), "done"]), "go")
    before = len(policy.sent[0][0]) + len(call(agent)) + 1
    limit = before + room
    policy = Seen([call(agent), "done"])
    trajectory = await rollout(policy, "go", max_sequence_tokens=limit, max_tokens_per_turn=100)
    [sequence] = trajectory.sequences
    require_both_or_neither(sequence.ids, sequence.images)
    assert len(sequence) <= limit
    assert sequence.ids == whole.sequences[0].ids[: len(sequence)]
    if len(whole.sequences[0]) > limit:
        assert trajectory.finish_reason is FinishReason.LENGTH


async def test_nothing_is_sampled_after_an_observation_whose_image_was_left_out(agent: af.Agent) -> None:
    recorder = TokenRecorder(sequences := [], max_tokens=10, stop_ids=[IM_END], barred_ids=[PIXEL])  # type: ignore[var-annotated]
    recorder.begin_sequence(RenderedTokens([1, 2]))
    recorder.prompt_ids()
    recorder.append_sampled(Generation([IM_END], [0.0], "stop", 0))
    recorder.append_rendered(RenderedTokens([3, *[PIXEL] * 20, 4], (PlacedImage(image(20), 1, 21),)))
    assert (list(sequences[0].ids), sequences[0].images) == ([1, 2, IM_END, 3], [])
    assert recorder.remaining == 0
    recorder.begin_sequence(RenderedTokens([1, 2]))
    assert recorder.remaining == 8


async def test_the_output_limit_of_a_tool_cuts_text_and_keeps_image_and_placeholders_together() -> None:
    @af.tool(max_output_tokens=5)
    def photograph() -> list[Any]:
        """Take a photograph."""
        return ["a description that is far too long", image(20)]

    agent = af.Agent(model="m", tools=[photograph])
    policy = Seen([call(agent), "done"])
    [trajectory] = (await af.run(agent, ["go"], policy=policy)).trajectories
    [record] = trajectory.turns[0].tool_results
    assert "left out" in record.observation
    assert record.images == (image(20),)
    require_both_or_neither(*policy.sent[1])
    assert len(policy.sent[1][1]) == 1


async def test_a_model_without_eyes_is_shown_no_task_with_images(agent: af.Agent) -> None:
    def never(prompt: str, turn: int) -> str:
        raise AssertionError("it was asked all the same")

    with pytest.raises(FailureBudgetExceeded, match=r"role 'user' holds .*a model that sees no images"):
        await rollout(af.ScriptedPolicy(never), af.Task([with_images(image(9))]))  # type: ignore[list-item]


async def test_a_model_without_eyes_goes_no_further_than_the_image_of_a_tool(agent: af.Agent) -> None:
    with pytest.raises(FailureBudgetExceeded, match=r"role 'tool' holds .*a model that sees no images"):
        await rollout(af.ScriptedPolicy([call(agent), "a cat, I guess"]), "go")


async def test_a_policy_that_samples_a_placeholder_is_refused() -> None:
    class Dreaming(af.ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            return Generation([*b"I see ", PIXEL, IM_END], [0.0] * 8, "stop", 0)

    with pytest.raises(FailureBudgetExceeded, match=r"TokenInvariantError .*a token that is reserved for images"):
        await rollout(Dreaming([], sees=True), "go")


async def test_tokens_that_a_server_tells_are_no_record_where_it_was_shown_images() -> None:
    class Server:
        async def chat(self, messages, tools, sampling, *, rollout_id):
            return ChatGeneration("red", (), "stop", prompt_ids=[1, PIXEL], ids=[2], logprobs=[0.0])

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_: object) -> None: ...

    blind, seeing = await rollout(Server(), "go"), await rollout(Server(), af.Task([with_images(image(9))]))  # type: ignore[list-item]
    assert (blind.has_tokens, seeing.has_tokens) == (True, False)
    assert seeing.response == "red"


# --- in chat formats --------------------------------------------------------------------------------------------------

ASKED: Message = {"role": "user", "content": "question"}
SAID: Message = {"role": "assistant", "content": "answer"}
RESULT: Message = {"role": "tool", "content": "result"}


def chat_of(tokenizer: ByteTokenizer) -> TemplateChatFormat:
    return TemplateChatFormat(tokenizer, [ProbeExchange(SAID, (RESULT,))])


texts = st.sampled_from(["", "x", "<|image|>", "a<|image|><|image|>b", "<|im_end|>\n<|im_start|>", "\ufdd0"])
contents = st.lists(st.one_of(texts, st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(contents, min_size=1, max_size=4), st.lists(contents, min_size=1, max_size=3))
def test_placeholders_are_images_whatever_texts_spell(opening: list[list[Any]], following: list[list[Any]]) -> None:
    chat = chat_of(ByteTokenizer(sees=True))

    def shown(role: str, parts: list[Any]) -> dict[str, Any]:
        made = (
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": image(part)}
            for part in parts
        )
        return {"role": role, "content": list(made)}

    view = [shown("user", parts) for parts in opening]
    prompt = chat.render_prompt(view)  # type: ignore[arg-type]
    require_both_or_neither(prompt.ids, prompt.images)
    answers = [shown("tool", parts) for parts in following]
    after = [*prompt.ids, ord("a"), IM_END]
    rest = chat.render_continuation(answers, after=after, conversation=[*view, SAID, *answers])  # type: ignore[arg-type, list-item]
    assert rest is not None
    require_both_or_neither(rest.ids, rest.images)
    wanted = [part for parts in [*opening, *following] for part in parts if isinstance(part, int)]
    assert [len(placed.image.data) // 16 for placed in (*prompt.images, *rest.images)] == wanted


class DropsImages(ByteTokenizer):
    """Its template leaves images out of messages of some roles, without a word."""

    def __init__(self, *roles: str) -> None:
        super().__init__(sees=True)
        self._roles = roles

    def apply_chat_template(self, messages, **how):
        from agentfly.core.messages import text_of

        kept = [
            {**message, "content": text_of(message["content"])} if message["role"] in self._roles else message
            for message in messages
        ]
        return super().apply_chat_template(kept, **how)  # type: ignore[arg-type]


def test_a_template_that_drops_images_is_refused_before_it_is_used() -> None:
    chat = chat_of(DropsImages("user", "tool"))
    with pytest.raises(
        ChatFormatError, match=r"writes 0 placeholders '<\|image\|>' for 1 images in messages of the roles"
    ):
        chat.render_prompt([with_images(image(2))])  # type: ignore[list-item]
    after = [*chat.render_prompt([ASKED]).ids, IM_END]
    answer = with_images(image(2), role="tool")
    with pytest.raises(ChatFormatError, match="would not see what it is shown"):
        chat.render_continuation([answer], after=after, conversation=[ASKED, SAID, answer])  # type: ignore[list-item]


def test_images_of_results_follow_in_a_message_of_the_user_where_the_template_drops_them() -> None:
    tokenizer = DropsImages("tool")
    chat = chat_of(tokenizer)
    after = [*chat.render_prompt([ASKED]).ids, IM_END]
    answers = [with_images(image(2), text="one", role="tool"), with_images(image(1), text="two", role="tool")]
    rest = chat.render_continuation(answers, after=after, conversation=[ASKED, SAID, *answers])  # type: ignore[arg-type, list-item]
    assert rest is not None
    assert tokenizer.decode(rest.ids) == (
        "\n<|im_start|>tool\none<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n"
        "<|im_start|>user\n<|image|><|image|><|image|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [(placed.image, placed.stop - placed.start) for placed in rest.images] == [(image(2), 2), (image(1), 1)]


# --- on the recorder --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 30))
def test_a_cut_never_parts_an_image(layout: list[int], length: int) -> None:
    ids: list[int] = []
    images: list[PlacedImage] = []
    for tokens in layout:
        ids += [1, *[PIXEL] * tokens]
        if tokens:
            images.append(PlacedImage(image(tokens), len(ids) - tokens, len(ids)))
    sequence = TokenSequence()
    sequence.append_prompt(ids, images)
    sequence.truncate(length)
    require_both_or_neither(sequence.ids, sequence.images)
    assert len(sequence) <= max(length, 0) or len(ids) <= length


def test_the_same_ids_with_another_image_are_another_conversation() -> None:
    recorder = TokenRecorder(sequences := [], max_tokens=100, stop_ids=[IM_END])  # type: ignore[var-annotated]
    recorder.continue_or_begin(RenderedTokens([1, PIXEL], (PlacedImage(image(1), 1, 2),)))
    recorder.prompt_ids()
    recorder.append_sampled(Generation([IM_END], [0.0], "stop", 0))
    longer = [1, PIXEL, IM_END, 2]
    recorder.continue_or_begin(RenderedTokens(longer, (PlacedImage(image(1, b"o"), 1, 2),)))
    recorder.prompt_ids()
    assert len(sequences) == 2
    recorder.append_sampled(Generation([IM_END], [0.0], "stop", 0))
    recorder.continue_or_begin(RenderedTokens([*longer, IM_END, 3], (PlacedImage(image(1, b"o"), 1, 2),)))
    assert len(sequences) == 2
