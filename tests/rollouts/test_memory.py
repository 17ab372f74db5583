"""Memory in rollouts: the view and the tokens of each turn, under both strategies."""

import asyncio
import inspect
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.agents.agent import Agent
from agentfly.agents.memory import HEADING, FullHistory, SummaryFolding, Window, make_memory
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ConfigError, PromptTooLong
from agentfly.core.tokens import Origin
from agentfly.core.trajectory import FinishReason
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.run import run

STRATEGIES = ["chain", "step"]


@tool
def look(number: int) -> str:
    """Look at something.

    Args:
        number: which thing.
    """
    return f"seen {number}"


def call(number):
    return HermesFormat().write("look", {"number": number})


class Watching(ScriptedPolicy):
    """Keeps what it was sent, and what it sampled."""

    def __init__(self, script):
        super().__init__(script, limited=True)
        self.asked = []

    async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
        generation = await super().generate(prompt_ids, sampling, rollout_id=rollout_id)
        self.asked.append((list(prompt_ids), list(generation.ids)))
        return generation

    @property
    def prompts(self):
        return [self.tokenizer.decode(prompt) for prompt, _ in self.asked]


def turns(count):
    """Looks at so many things, writes summaries when asked, and answers."""

    def script(prompt, turn):
        if "Call no tool now." in prompt.rpartition("<|im_start|>user")[2]:
            return f"summary {turn}"
        seen = script.seen  # type: ignore[attr-defined]
        script.seen += 1  # type: ignore[attr-defined]
        return call(seen) if seen < count else "the answer"

    script.seen = 0  # type: ignore[attr-defined]
    return script


async def play(memory, script, strategy="chain", **agent):
    policy = Watching(script)
    agent = {"tool_prompt": "", "max_turns": 20, **agent}
    made = Agent(model="scripted", tools=[look], memory=memory, **agent)
    result = await run(made, ["go"], policy=policy, strategy=strategy)
    return result.trajectories[0], policy


def assert_every_token_has_its_one_place(trajectory, policy):
    """Each sampled token stands in one sequence, at its own place, after exactly what was sent for it."""
    assert len(trajectory.turns) == len(policy.asked)
    for turn, (prompt, sampled) in zip(trajectory.turns, policy.asked, strict=True):
        sequence = trajectory.sequences[turn.sequence]
        assert list(sequence.ids[: turn.start]) == prompt
        assert list(sequence.ids[turn.start : turn.stop]) == sampled
        assert set(sequence.origins[turn.start : turn.stop]) == {Origin.SAMPLED}
    counted = sum(sequence.sampled_count for sequence in trajectory.sequences)
    assert counted == sum(len(sampled) for _, sampled in policy.asked)


class Forgetful:
    """Recalls any of the exchanges, as it is told for each turn."""

    def __init__(self, kept):
        self.kept = kept

    async def recall(self, past):
        number = past.state["turn"] = past.state.get("turn", -1) + 1
        chosen = [one for index, one in enumerate(past.exchanges) if index in self.kept[number % len(self.kept)]]
        return [*past.opening, *itertools.chain.from_iterable(chosen)]


memories = st.one_of(
    st.builds(FullHistory),
    st.builds(Window, st.integers(1, 4)),
    st.builds(SummaryFolding, after_turns=st.integers(2, 4), keep_turns=st.integers(0, 1)),
    st.builds(SummaryFolding, after_tokens=st.integers(50, 400)),
    st.builds(Forgetful, st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=4)),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(memory=memories, count=st.integers(0, 6), strategy=st.sampled_from(STRATEGIES))
async def test_whatever_is_remembered_each_sampled_token_is_trained_once_after_what_was_sent(memory, count, strategy):
    trajectory, policy = await play(memory, turns(count), strategy)
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert_every_token_has_its_one_place(trajectory, policy)
    if strategy == "step":
        assert len(trajectory.sequences) == len(trajectory.turns)


async def test_a_full_history_is_one_sequence():
    trajectory, _ = await play(FullHistory(), turns(4))
    assert len(trajectory.sequences) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_window_shows_the_task_and_whole_turns_only(strategy):
    trajectory, policy = await play(Window(turns=2), turns(4), strategy)
    last = policy.prompts[-1]
    assert "go" in last
    assert ["seen 0" in last, "seen 1" in last, "seen 2" in last, "seen 3" in last] == [False, False, True, True]
    assert last.count("<|im_start|>tool") == last.count("<tool_call>") == 2
    assert len(trajectory.messages) == 1 + 2 * 4 + 1


async def test_a_window_continues_the_sequence_until_something_falls_out():
    trajectory, _ = await play(Window(turns=2), turns(3))
    assert [turn.sequence for turn in trajectory.turns] == [0, 0, 0, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_folded_past_is_replaced_by_the_models_own_summary(strategy):
    trajectory, policy = await play(SummaryFolding(after_turns=2), turns(4), strategy)
    kinds = [turn.kind for turn in trajectory.turns]
    assert kinds == ["act", "act", "act", "memory", "act", "act"]
    after = policy.prompts[4]
    assert f"go\n\n{HEADING}\nsummary 3" in after
    assert "seen" not in after
    if strategy == "chain":
        assert [turn.sequence for turn in trajectory.turns] == [0, 0, 0, 0, 1, 1]
    assert trajectory.turns[3].text == "summary 3"
    assert all("summary" not in str(message["content"]) for message in trajectory.messages)


async def test_later_summaries_stand_on_the_earlier_ones_and_the_last_turns_may_be_kept():
    _, policy = await play(SummaryFolding(after_turns=2, keep_turns=1), turns(5))
    folds = [prompt for prompt in policy.prompts if "Call no tool now." in prompt]
    assert len(folds) == 2
    assert "summary" in folds[1]
    assert "seen 2" in policy.prompts[4]
    assert "seen 1" not in policy.prompts[4]


async def test_folding_by_tokens_keeps_below_the_limit_what_would_else_pass_it():
    limit = 700
    plain, _ = await play(FullHistory(), turns(12), max_sequence_tokens=limit, max_tokens_per_turn=100)
    assert plain.finish_reason is FinishReason.LENGTH
    folding = SummaryFolding(after_tokens=400, max_summary_tokens=100)
    folded, _ = await play(folding, turns(12), max_sequence_tokens=limit, max_tokens_per_turn=100)
    assert folded.finish_reason is FinishReason.ANSWERED
    assert max(map(len, folded.sequences)) <= limit
    assert not any(sequence.truncated for sequence in folded.sequences)


async def test_a_function_may_summarise_and_the_model_is_not_asked():
    def briefly(messages, context):
        return f"{len(messages)} messages of {context.rollout_id}"

    trajectory, policy = await play(SummaryFolding(after_turns=1, summarise=briefly), turns(3))
    assert {turn.kind for turn in trajectory.turns} == {"act"}
    assert f"5 messages of {trajectory.rollout_id}" in policy.prompts[2]


async def test_a_summary_may_hold_what_no_tokenizer_takes_and_is_only_words():
    memory = SummaryFolding(after_turns=1, summarise=lambda view, context: "half \ud800 <|im_end|>")
    trajectory, policy = await play(memory, turns(2))
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert f"{HEADING}\nhalf ? <|im_end|><|im_end|>" in policy.prompts[-1]
    assert list(trajectory.sequences[-1].ids).count(policy.tokenizer.eos_ids[0]) == 2  # of the user and of the model


async def test_a_summary_that_finds_no_room_ends_the_rollout_as_length():
    folding = SummaryFolding(after_turns=1)
    trajectory, _ = await play(folding, turns(5), max_sequence_tokens=230, max_tokens_per_turn=100)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.failure is None


async def test_calls_in_a_summary_are_not_executed():
    def script(prompt, turn):
        return call(9) if "Call no tool now." in prompt else [call(0), call(1), "", "done"][turn]

    trajectory, _ = await play(SummaryFolding(after_turns=1), script)
    assert [len(turn.tool_results) for turn in trajectory.turns] == [1, 1, 0, 0]


async def test_a_memory_of_ones_own_can_keep_state_and_ask_the_model():
    class Diary:
        async def recall(self, past):
            if past.exchanges:
                entry = await past.ask([*past.opening, *past.exchanges[-1], {"role": "user", "content": "Note it."}])
                past.state.setdefault("diary", []).append(entry)
            notes = [{"role": "user", "content": note} for note in past.state.get("diary", [])]
            return [*past.opening, *notes]

    script = [call(0), "first", call(1), "second", "done"]
    trajectory, policy = await play(Diary(), script)
    assert [turn.kind for turn in trajectory.turns] == ["act", "memory", "act", "memory", "act"]
    assert "first" in policy.prompts[-1]
    assert "second" in policy.prompts[-1]
    assert_every_token_has_its_one_place(trajectory, policy)


async def test_state_of_a_memory_is_of_one_rollout():
    class Counting:
        async def recall(self, past):
            past.state["calls"] = past.state.get("calls", 0) + 1
            assert past.state["calls"] <= 2
            return past.messages

    made = Agent(model="scripted", tools=[look], memory=Counting())
    result = await run(made, ["a", "b", "c"], attempts=3, policy=ScriptedPolicy([call(0), "done"]))
    assert {t.finish_reason for t in result.trajectories} == {FinishReason.ANSWERED}


def recalling(view):
    """A memory that recalls what a function, sync or async, makes of the past, once there is one."""

    class Own:
        async def recall(self, past):
            seen = view(past) if past.exchanges else past.messages
            return await seen if inspect.isawaitable(seen) else seen

    return Own()


def without(role, number):
    """A view that lacks one of the messages of a role."""

    def view(past):
        excluded = [message for message in past.messages if message["role"] == role][number]
        return [message for message in past.messages if message is not excluded]

    return view


NO_VIEWS = {
    "empty": (lambda past: [], "past.opening"),
    "none": (lambda past: None, "is None. It must be a list"),
    "generator": (lambda past: (one for one in past.messages), "is a generator. It must be a list"),
    "text": (lambda past: "words", "is a str. It must be a list"),
    "one message": (lambda past: past.messages[0], "is a dict. It must be a list"),
    "no role": (lambda past: [{"content": "words"}], "no message with a role"),
    "other role": (lambda past: [{"role": "robot", "content": "words"}], "no message with a role"),
    "no content": (lambda past: [{"role": "user"}], "content is neither"),
    "null": (lambda past: [{"role": "user", "content": None}], "content is neither"),
    "odd part": (lambda past: [{"role": "user", "content": [{"type": "sound"}]}], "content holds something"),
    "result without its call": (without("assistant", 0), "past.exchanges"),
    "last result only": (lambda past: [*past.opening, *past.messages[-1:]], "past.exchanges"),
    "one result of two": (without("tool", 1), "past.exchanges"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("asked", [False, True], ids=["recalled", "asked"])
@pytest.mark.parametrize(("view", "cure"), NO_VIEWS.values(), ids=NO_VIEWS)
async def test_a_view_that_no_model_can_be_shown_is_refused_with_the_cure(view, cure, asked, strategy):
    async def ask(past):
        return await past.ask(view(past)) and past.messages

    with pytest.raises(FailureBudgetExceeded, match=f"UsageError.*memory Own.*{cure}"):
        await play(recalling(ask if asked else view), [call(0) + call(1), "done"], strategy)


async def test_calls_that_stand_in_the_template_are_shown_with_all_their_results():
    memory, settings = recalling(without("tool", 0)), {"tool_prompt": None}
    with pytest.raises(FailureBudgetExceeded, match=r"past\.exchanges"):
        await play(memory, [call(0), "done"], tool_call_format=HermesFormat(uses_chat_template=True), **settings)


@pytest.mark.parametrize("number", [0, -1])
async def test_a_memory_cannot_ask_for_less_than_a_token(number):
    with pytest.raises(FailureBudgetExceeded, match="at least 1"):
        await play(recalling(lambda past: past.ask(past.messages, max_tokens=number)), [call(0), "done"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("known", [True, False], ids=["continued", "begun"])
async def test_a_memory_may_try_a_smaller_view_when_one_was_too_long(strategy, known):
    async def ask(past):
        beginning = past.messages if known else []
        with pytest.raises(PromptTooLong):
            await past.ask([*beginning, {"role": "user", "content": "x" * 5000}])
        await past.ask([*past.messages, {"role": "user", "content": "Call no tool now."}])
        return past.messages

    trajectory, policy = await play(recalling(ask), turns(2), strategy, max_sequence_tokens=2000)
    assert [turn.kind for turn in trajectory.turns] == ["act", "memory", "act", "memory", "act"]
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert_every_token_has_its_one_place(trajectory, policy)
    assert all(sequence.sampled_count for sequence in trajectory.sequences)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_a_memory_asks_at_once_is_answered_one_after_another(strategy):
    async def script(prompt, turn):
        await asyncio.sleep(0.001)
        return call(0) if turn == 0 else "said"

    async def ask(past):
        views = [[*past.opening, {"role": "user", "content": question}] for question in ("one?", "two?", "three?")]
        await asyncio.gather(*map(past.ask, views))
        return past.messages

    trajectory, policy = await play(recalling(ask), script, strategy)
    assert [turn.kind for turn in trajectory.turns] == ["act", "memory", "memory", "memory", "act"]
    assert_every_token_has_its_one_place(trajectory, policy)


@pytest.mark.parametrize("raised", [SystemExit(1), asyncio.CancelledError(), TimeoutError("slow"), StopIteration()])
@pytest.mark.parametrize("summarises", [False, True])
async def test_nothing_that_a_memory_raises_ends_more_than_its_rollout(raised, summarises):
    def fail(*_):
        raise raised

    memory = SummaryFolding(after_turns=1, summarise=fail) if summarises else recalling(fail)
    made = Agent(model="scripted", tools=[look], memory=memory)
    policy = ScriptedPolicy(lambda prompt, turn: call(turn) if "stay" in prompt else "done")
    result = await run(made, ["leave", "stay", "leave"], policy=policy, max_failure_rate=1.0)
    assert [one.finish_reason for one in result.trajectories] == ["answered", "failed", "answered"]


def test_contradictions_are_refused_when_the_agent_is_built():
    good = Agent(model="scripted", memory=SummaryFolding(after_tokens=900), max_sequence_tokens=2000)
    with pytest.raises(ConfigError, match="before anything is folded"):
        replace(good, max_sequence_tokens=1000)
    for memory in (Window, object(), "full", lambda messages: messages):
        with pytest.raises(ConfigError, match="async def recall"):
            replace(good, memory=memory)  # type: ignore[arg-type]
    for wrong in ({}, {"after_turns": 0}, {"after_turns": 2, "keep_turns": 2}, {"after_tokens": 1.5}):
        with pytest.raises(ConfigError, match="SummaryFolding"):
            SummaryFolding(**wrong)
    with pytest.raises(ConfigError, match="turns=0"):
        Window(turns=0)


def test_memories_by_the_words_of_a_configuration():
    assert make_memory("full", {}) == FullHistory()
    assert make_memory("window", {"turns": 3}) == Window(3)
    assert make_memory("summary", {"after_turns": 3, "keep_turns": 1}) == SummaryFolding(after_turns=3, keep_turns=1)
    with pytest.raises(ConfigError, match="Did you mean 'window'"):
        make_memory("windw", {})
    with pytest.raises(ConfigError, match="Did you mean 'turns'"):
        make_memory("window", {"turn": 3})
    with pytest.raises(ConfigError, match="cannot be made"):
        make_memory("window", {})


async def test_what_a_failing_summary_function_raises_spoils_its_rollout():
    def broken(messages, context):
        raise OSError("no disk")

    def script(prompt, turn):
        return "fine" if "two" in prompt else call(turn)

    made = Agent(model="scripted", tools=[look], memory=SummaryFolding(after_turns=1, summarise=broken))
    one, two = (await run(made, ["one", "two"], policy=ScriptedPolicy(script))).trajectories
    assert one.failure.kind == "OSError"
    assert one.infrastructure_failed
    assert two.finish_reason is FinishReason.ANSWERED
