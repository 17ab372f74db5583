"""The chain strategy: one sequence, exact to the token."""

import pytest

from agentfly.errors import TokenInvariantError
from agentfly.policies.policy import Generation
from agentfly.policies.scripted import ByteTokenizer
from agentfly.rollouts.chain import Chain
from agentfly.rollouts.chat.template_format import TemplateChatFormat

IM_END = 257


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


def chain(limit=10_000, tokenizer=None):
    chat = TemplateChatFormat(tokenizer or ByteTokenizer(), lambda text: {"role": "tool", "content": text})
    return Chain(chat, limit), chat


def test_the_next_turns_prompt_is_the_sent_ids_plus_the_sampled_ids_plus_the_rendered_answer():
    strategy, chat = chain(tokenizer=MergingTokenizer())
    strategy.begin([{"role": "user", "content": "greet"}])
    first = list(strategy.prompt())
    sampled = [*b"he", *b"llo", IM_END]
    strategy.sampled(generation(sampled))
    answer = [{"role": "tool", "content": "ok"}]
    strategy.observed(answer)
    assert list(strategy.prompt()) == first + sampled + chat.continuation(answer, ended=True)


def test_the_mask_holds_the_sampled_end_of_turn_and_nothing_rendered():
    strategy, _ = chain()
    strategy.begin([{"role": "user", "content": "q"}])
    prompt = len(strategy.prompt())
    strategy.sampled(generation([*b"ab", IM_END]))
    strategy.observed([{"role": "tool", "content": "x"}])
    seen = len(strategy.prompt())
    strategy.sampled(generation([*b"c", IM_END]))
    strategy.finish()
    [sequence] = strategy.sequences
    assert sequence.loss_mask == [0] * prompt + [1] * 3 + [0] * (seen - prompt - 3) + [1] * 2


def total_of(prompt_tokens, observation_tokens, limit):
    """A chain whose prompt and observation have a given length: 4 sampled, an observation, 4 sampled."""

    class FixedChat:
        stop_ids = (IM_END,)

        def prompt(self, messages):
            return [1] * prompt_tokens

        def continuation(self, messages, *, ended):
            return [2] * observation_tokens

        def text(self, ids):
            return ""

    strategy = Chain(FixedChat(), limit)
    strategy.begin([])
    strategy.prompt()
    strategy.sampled(generation([3, 3, 3, IM_END]))
    strategy.observed([])
    if strategy.room > 0:
        strategy.prompt()
        room = min(4, strategy.room)
        strategy.sampled(generation([4] * room, finish="stop" if room == 4 else "length"))
    strategy.finish()
    return strategy.sequences[0]


@pytest.mark.parametrize(
    ("limit", "mask", "truncated"),
    [(11, "11110001111", False), (9, "111100011", True), (7, "1111000", False), (6, "111100", True)],
)
def test_what_does_not_fit_the_total_is_cut_at_one_index(limit, mask, truncated):
    sequence = total_of(0, 3, limit)
    assert "".join(map(str, sequence.loss_mask)) == mask
    assert len(sequence.ids) == len(sequence.logprobs) == len(sequence.versions) == len(mask)
    assert sequence.truncated is truncated


def test_ids_that_were_changed_between_turns_are_noticed():
    strategy, _ = chain()
    strategy.begin([{"role": "user", "content": "q"}])
    strategy.prompt()
    strategy.sampled(generation([*b"hello", IM_END]))
    strategy.sequences[0].ids[-2] = ord("p")
    with pytest.raises(TokenInvariantError, match="do not start with"):
        strategy.prompt()


def test_ids_whose_number_differs_from_their_logprobs_are_refused():
    strategy, _ = chain()
    strategy.begin([{"role": "user", "content": "q"}])
    strategy.prompt()
    with pytest.raises(TokenInvariantError, match="9 sampled ids came with 4"):
        strategy.sampled(generation(list(range(9)), logprobs=[-0.1] * 4))


def test_a_generation_of_no_token_is_refused():
    strategy, _ = chain()
    strategy.begin([{"role": "user", "content": "q"}])
    strategy.prompt()
    with pytest.raises(TokenInvariantError, match="no token"):
        strategy.sampled(generation([]))


def test_a_mask_that_covers_something_rendered_is_noticed_at_the_end():
    strategy, _ = chain()
    strategy.begin([{"role": "user", "content": "q"}])
    strategy.prompt()
    strategy.sampled(generation([*b"a", IM_END]))
    strategy.sequences[0].append_sampled([5], [-0.1], version=0)
    with pytest.raises(TokenInvariantError, match="mask"):
        strategy.finish()
