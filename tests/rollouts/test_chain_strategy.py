"""The chain strategy: one sequence, exact to the token."""

from typing import Any

import pytest

from agentfly.core.errors import TokenInvariantError
from agentfly.core.messages import Image, Message, PlacedImage
from agentfly.formats.chat.chat_format import RenderedTokens
from agentfly.formats.chat.prefix_stability import ProbeExchange
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.policies.policy import Generation
from agentfly.policies.scripted import ByteTokenizer
from agentfly.rollouts.token_recorder import ChainStrategy, StepStrategy, TokenRecorder

IM_END = 257
ASKED: Message = {"role": "user", "content": "greet"}
SAID: Message = {"role": "assistant", "content": "hello"}
ANSWER: Message = {"role": "tool", "content": "ok"}


class MergingTokenizer(ByteTokenizer):
    """Encodes ``hello`` as one id, so that a model may sample ids that its text does not encode to."""

    hello = 300

    def encode_text(self, text):
        head, *rest = text.split("hello")
        ids = super().encode_text(head)
        for part in rest:
            ids += [self.hello, *super().encode_text(part)]
        return ids


def generation(ids, logprobs=None, finish="stop", version=0):
    return Generation(ids, [-0.5] * len(ids) if logprobs is None else logprobs, finish, version)


class Conversation:
    """A conversation under a strategy, its turns given by hand."""

    def __init__(self, strategy=ChainStrategy, *, limit=10_000, tokenizer=None, chat=None):
        self.chat = chat or TemplateChatFormat(tokenizer or ByteTokenizer(), [ProbeExchange(SAID, (ANSWER,))])
        self.sequences = []  # type: ignore[var-annotated]
        self.recorder = TokenRecorder(self.sequences, max_tokens=limit, stop_ids=[IM_END])
        self.strategy = strategy(self.chat, self.recorder)
        self.view = []

    def sees(self, *messages):
        self.view += messages
        self.strategy.render_view(self.view)
        return list(self.recorder.prompt_ids())

    def says(self, made, message=SAID):
        place = self.recorder.append_sampled(made)
        self.view.append(message)
        self.strategy.add_reply(message)
        return place


def test_the_next_turns_prompt_is_the_sent_ids_plus_the_sampled_ids_plus_the_rendered_answer():
    talk = Conversation(tokenizer=MergingTokenizer())
    first = talk.sees(ASKED)
    sampled = [*b"he", *b"llo", IM_END]
    talk.says(generation(sampled))
    after = talk.chat.render_continuation([ANSWER], after=[IM_END], conversation=[]).ids
    assert talk.sees(ANSWER) == first + sampled + list(after)


def test_the_mask_holds_the_sampled_end_of_turn_and_nothing_rendered():
    talk = Conversation()
    prompt = len(talk.sees(ASKED))
    talk.says(generation([*b"ab", IM_END]))
    seen = len(talk.sees(ANSWER))
    talk.says(generation([*b"c", IM_END]))
    talk.recorder.finish()
    [sequence] = talk.sequences
    assert sequence.loss_mask == [0] * prompt + [1] * 3 + [0] * (seen - prompt - 3) + [1] * 2


class FixedChat:
    """Renders a prompt and observations of given lengths."""

    stop_ids = (IM_END,)

    def __init__(self, prompt_tokens, observation_tokens):
        self._prompt, self._observation = [1] * prompt_tokens, [2] * observation_tokens

    def render_prompt(self, messages, tools=()):
        return RenderedTokens(self._prompt)

    def render_continuation(self, messages, *, after, conversation, tools=()):
        return RenderedTokens(self._observation)


@pytest.mark.parametrize(
    ("limit", "mask", "truncated"),
    [(11, "11110001111", False), (9, "111100011", True), (7, "1111000", False), (6, "111100", True)],
)
def test_what_does_not_fit_the_total_is_cut_at_one_index(limit, mask, truncated):
    talk = Conversation(limit=limit, chat=FixedChat(0, 3))
    talk.sees(ASKED)
    talk.says(generation([3, 3, 3, IM_END]))
    talk.sees(ANSWER)
    if talk.recorder.remaining > 0:
        room = min(4, talk.recorder.remaining)
        talk.says(generation([4] * room, finish="stop" if room == 4 else "length"))
    talk.recorder.finish()
    [sequence] = talk.sequences
    assert "".join(map(str, sequence.loss_mask)) == mask
    assert len(sequence.ids) == len(sequence.logprobs) == len(sequence.versions) == len(mask)
    assert sequence.truncated is truncated


def test_a_view_that_does_not_go_on_from_what_was_said_begins_a_new_sequence():
    talk = Conversation()
    talk.sees(ASKED)
    talk.says(generation([*b"ab", IM_END]))
    talk.view = [ASKED, {**SAID, "content": "something else"}]
    prompt = talk.sees(ANSWER)
    talk.says(generation([*b"c", IM_END]))
    talk.recorder.finish()
    assert [sequence.sampled_count for sequence in talk.sequences] == [3, 2]
    assert list(talk.sequences[1].ids) == [*prompt, *b"c", IM_END]


def test_a_format_that_would_rewrite_what_was_sent_begins_a_new_sequence():
    class Rewriting(FixedChat):
        def render_continuation(self, messages, *, after, conversation, tools=()):
            return None

    talk = Conversation(chat=Rewriting(2, 0))
    talk.sees(ASKED)
    talk.says(generation([4, IM_END]))
    talk.sees(ANSWER)
    talk.says(generation([5, IM_END]))
    talk.recorder.finish()
    assert [list(sequence.ids) for sequence in talk.sequences] == [[1, 1, 4, IM_END], [1, 1, 5, IM_END]]


def test_under_the_step_strategy_every_turn_is_a_sequence_of_its_own_with_the_whole_view_as_its_prompt():
    talk = Conversation(StepStrategy)
    talk.sees(ASKED)
    talk.says(generation([*b"hello", IM_END]))
    second = talk.sees(ANSWER)
    talk.says(generation([*b"c", IM_END]))
    talk.recorder.finish()
    assert second == list(talk.chat.render_prompt([ASKED, SAID, ANSWER]).ids)
    assert [sequence.sampled_count for sequence in talk.sequences] == [6, 2]


def test_ids_that_were_changed_between_turns_are_noticed():
    talk = Conversation()
    talk.sees(ASKED)
    talk.says(generation([*b"hello", IM_END]))
    talk.sequences[0].ids[-2] = ord("p")
    with pytest.raises(TokenInvariantError, match="do not start with"):
        talk.sees(ANSWER)


def test_ids_whose_number_differs_from_their_logprobs_are_refused():
    talk = Conversation()
    talk.sees(ASKED)
    with pytest.raises(TokenInvariantError, match="9 sampled ids came with 4"):
        talk.says(generation(list(range(9)), logprobs=[-0.1] * 4))


def test_a_generation_of_no_token_is_refused():
    talk = Conversation()
    talk.sees(ASKED)
    with pytest.raises(TokenInvariantError, match="no token"):
        talk.says(generation([]))


def test_a_mask_that_covers_something_rendered_is_noticed_at_the_end():
    talk = Conversation()
    talk.sees(ASKED)
    talk.says(generation([*b"a", IM_END]))
    talk.sequences[0].append_sampled([5], [-0.1], version=0)
    with pytest.raises(TokenInvariantError, match="mask"):
        talk.recorder.finish()


def test_a_whole_prompt_that_goes_on_from_the_sequence_extends_it_and_another_begins_a_new_one():
    sequences: list[Any] = []
    recorder = TokenRecorder(sequences, max_tokens=100, stop_ids=[9])
    recorder.continue_or_begin(RenderedTokens([1, 2]))
    recorder.append_sampled(generation([3, 9]))
    recorder.continue_or_begin(RenderedTokens([1, 2, 3, 9, 4]))
    recorder.append_sampled(generation([5, 9]))
    recorder.continue_or_begin(RenderedTokens([1, 2, 3, 4]))
    recorder.append_sampled(generation([6, 9]))
    recorder.finish()
    assert [list(sequence.ids) for sequence in sequences] == [[1, 2, 3, 9, 4, 5, 9], [1, 2, 3, 4, 6, 9]]
    assert [sequence.loss_mask for sequence in sequences] == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_nothing_is_sampled_after_a_cut_even_where_an_image_left_room_by_going_whole():
    image = PlacedImage(Image(b"png", "image/png"), 1, 6)
    recorder = TokenRecorder([], max_tokens=6, stop_ids=[9])
    recorder.begin_sequence(RenderedTokens([1]))
    recorder.append_sampled(generation([9]))
    recorder.append_rendered(RenderedTokens([2, 7, 7, 7, 7, 7, 3], (image,)))
    assert (list(recorder.ids), list(recorder.images), recorder.remaining) == ([1, 9, 2], [], 0)
    recorder.begin_sequence(RenderedTokens([1, 2]))
    assert recorder.remaining == 4


def test_a_prompt_that_left_no_room_gives_its_place_to_the_next():
    sequences: list[Any] = []
    recorder = TokenRecorder(sequences, max_tokens=4, stop_ids=[9])
    recorder.begin_sequence(RenderedTokens([1, 2, 3, 4, 5]))
    recorder.begin_sequence(RenderedTokens([1, 2]))
    recorder.append_sampled(generation([9]))
    recorder.finish()
    assert [list(sequence.ids) for sequence in sequences] == [[1, 2, 9]]
    recorder.begin_sequence(RenderedTokens([1]))
    with pytest.raises(TokenInvariantError, match="before the previous one had a generation"):
        recorder.begin_sequence(RenderedTokens([2]))
