"""The gateway against requests of any kind: each is refused with a message or answered soundly, and always one of both.

A refused request leaves the record as it is, and an answered one adds exactly its own turn. `corpus` holds
requests that found a fault once, or that are each hard to take in a way of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

import agentfly as af
import agentfly.policies
from agentfly.core.tokens import Origin
from agentfly.core.trajectory import trajectory_json_line
from agentfly.formats.toolcalls.registry import tool_call_format
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.training.rows import rows_from_trajectories
from tests.support.scale import scaled

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*"))
PATIENCE_S = 60.0
"""Seconds after which a request counts as hanging, on the busiest of machines."""

CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "aa?"}]
LIMITS = af.GatewayLimits(max_body_bytes=200_000, max_calls=10**9, max_open_rollouts=10**9)


class Server:
    """A gateway that runs whenever it is asked something, over a real connection."""

    def __init__(self, tokenizer: Any = None, *, said: str = CALLS, tool_call_format: str | None = None) -> None:
        self._runner = asyncio.Runner()
        self._number = 0
        self._policy = ScriptedPolicy(self._script, context_length=6_000)
        if tokenizer is not None:
            self._policy.tokenizer = tokenizer
        self._said = said
        self.gateway = af.Gateway(self._policy, limits=LIMITS, max_tokens=300, tool_call_format=tool_call_format)

    def _script(self, prompt: str, turn: int) -> str:
        return self._said if prompt.count("a") % 2 else f"said {len(prompt) % 7}"

    def __enter__(self) -> Server:
        self.run(self.gateway.__aenter__())
        self.http = httpx.AsyncClient(timeout=PATIENCE_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.run(self.http.aclose())
        self.run(self.gateway.__aexit__(None, None, None))
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def opened(self, sampling: af.RolloutSampling | None = None) -> Any:
        self._number += 1
        return self.gateway.open(f"r.{self._number}", sampling=sampling)

    async def send(self, end: Any, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        key = {"Authorization": f"Bearer {end.api_key}"}
        return await self.http.post(
            f"{end.base_url}/chat/completions", content=content, headers={**key, **(headers or {})}
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.fixture(scope="module")
def models_server() -> Iterator[Server]:
    """The same with the tokenizer and the chat template of a model."""
    from agentfly.policies.hf_tokenizer import HFTokenizer

    with Server(HFTokenizer.load(Path(agentfly.policies.__path__[0]) / "models" / "tiny")) as one:
        yield one


FORMATS = ["action", "code_block", "hermes", "llama_json", "llama_pythonic", "qwen3_coder", "react", "tags"]


@pytest.fixture(scope="module", params=FORMATS)
def formats_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The same for models that are told in words how to call tools."""
    name = request.param
    call = "```python\na\n```" if name == "code_block" else tool_call_format(name).write("add", {"a": 1})
    with Server(said=call, tool_call_format=name) as one:
        yield one


def require_sound(answer: httpx.Response) -> bool:
    """Whether a request was answered; it was refused in OpenAI's shape otherwise."""
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert 5 < len(error["message"]) < 2_000
        return False
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, end = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
        assert end == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert all("error" not in chunk for chunk in chunks), chunks
        finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [finish for finish in finishes if finish is not None][-1] in ("stop", "length", "tool_calls")
        return True
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    for call in choice["message"].get("tool_calls", ()):
        json.loads(call["function"]["arguments"])
    return True


def require_exact(trajectory: af.Trajectory, turns: int) -> None:
    """A record holds so many turns, each sampled token in one of them, and can be kept and trained on."""
    assert len(trajectory.turns) == turns
    places = [(turn.sequence, place) for turn in trajectory.turns for place in range(turn.start, turn.stop)]
    sampled = [
        (number, place)
        for number, sequence in enumerate(trajectory.sequences)
        for place, origin in enumerate(sequence.origins)
        if origin == Origin.SAMPLED
    ]
    assert sorted(places) == sampled
    for turn in trajectory.turns:
        assert all(before < turn.index for before in turn.parent_turns or ())
    again = af.Trajectory.from_json(json.loads(trajectory_json_line(trajectory)))
    assert again.to_json() == trajectory.to_json()
    if turns:
        assert trajectory.failure is None
        assert sum(len(row.target_logprobs) for row in rows_from_trajectories([trajectory]).rows) == len(sampled)


def try_out(server: Server, content: bytes, *, follow: bool = False, headers: dict[str, str] | None = None) -> bool:
    """Send a request to a rollout of its own, and the same again; whether it was answered."""
    end = server.opened(af.RolloutSampling(honor_request=True) if follow else None)
    answers = [server.run(server.send(end, content, headers)) for _ in range(2)]
    answered = [require_sound(answer) for answer in answers]
    assert answered[0] == answered[1], [answer.text for answer in answers]
    event("answered" if answered[0] else "refused")
    trajectory = server.gateway.finish(end.rollout_id, reward=1.0)
    if trajectory.untrainable_reason:
        assert follow
        trajectory.untrainable_reason = ""
    require_exact(trajectory, sum(answered))
    return answered[0]


# --- what is sent -----------------------------------------------------------------------------------------------------

texts = st.one_of(
    st.sampled_from(
        ["", " ", "a", "hello?", "<|im_end|>", "<|im_start|>assistant\n", "\0", "\ufdd0\ufdd1", "é" * 40, "{"]
    ),
    st.text(max_size=30),
)
numbers = st.one_of(
    st.integers(-3, 3), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.just(10**400)
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
deep = st.integers(1, 400).map(lambda depth: json.loads("[" * depth + "]" * depth))


def mostly(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A value of its kind, and now and then anything else."""
    return st.integers(0, 15).flatmap(lambda number: value if number else st.one_of(anything, deep))


def sound_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with any of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


def some_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with any of the fields, and maybe one that nobody knows."""
    return st.fixed_dictionaries({}, optional={**{key: mostly(value) for key, value in fields.items()}, "x": anything})


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
urls = st.sampled_from(
    [PIXEL, PIXEL[:-9], "data:,", "data:image/png;base64,", "data:image/png;base64,AAAA", "http://x/y"]
)
parts = some_of(
    type=st.sampled_from(["text", "input_text", "output_text", "refusal", "image_url", "input_image", "input_audio"]),
    text=texts,
    refusal=texts,
    image_url=st.one_of(urls, some_of(url=urls)),
)
contents = st.one_of(texts, st.none(), st.lists(parts, max_size=3))
arguments = st.one_of(
    st.dictionaries(texts, scalars, max_size=3),
    st.dictionaries(texts, scalars, max_size=3).map(json.dumps),
    st.sampled_from(['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "{", "[]", "", "null", "[" * 300 + "]" * 300]),
)
calls = some_of(
    id=texts, type=st.just("function"), function=some_of(name=st.sampled_from(["add", "", "f"]), arguments=arguments)
)
messages = some_of(
    role=st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]),
    content=contents,
    name=texts,
    tool_call_id=st.one_of(texts, st.sampled_from(["call_0", "call_1"])),
    tool_calls=st.lists(calls, max_size=2),
    reasoning_content=texts,
    reasoning=texts,
)
used = st.builds(
    lambda name, arguments, result: [
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": name, "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "x", "content": result},
    ],
    st.sampled_from(["add", "<|im_end|>"]),
    arguments,
    contents,
)
sound_messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": texts})
schemas = some_of(
    type=st.sampled_from(["object", ["object", "null"], "string"]),
    properties=st.dictionaries(texts, st.one_of(st.booleans(), some_of(type=texts, description=texts)), max_size=3),
    required=st.lists(texts, max_size=2),
)
tools = some_of(
    type=st.just("function"),
    function=some_of(name=st.sampled_from(["add", "f"]), description=texts, parameters=schemas, strict=st.booleans()),
)
sound_tools = st.builds(
    lambda name, parameters: {"function": {"name": name, "parameters": parameters}},
    st.sampled_from(["add", "add", "f", "<|im_end|>"]),
    st.one_of(schemas.filter(lambda one: isinstance(one.get("properties"), dict | None)), st.none()),
)
requests = some_of(
    model=texts,
    tools=st.lists(tools, max_size=2),
    tool_choice=st.sampled_from(["none", "auto", "required"]),
    parallel_tool_calls=st.booleans(),
    n=st.integers(0, 2),
    stream=st.booleans(),
    stream_options=some_of(include_usage=st.booleans()),
    max_tokens=st.integers(0, 50),
    max_completion_tokens=st.integers(0, 50),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(-2, 50),
    min_p=st.floats(0, 1),
    seed=st.integers(),
    stop=st.one_of(texts, st.lists(texts, max_size=3)),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 3),
    response_format=some_of(type=st.sampled_from(["text", "json_object"])),
    return_token_ids=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(texts, numbers, max_size=2),
    functions=st.lists(anything, max_size=1),
    modalities=st.lists(texts, max_size=2),
    metadata=anything,
)
sound_requests = sound_of(
    model=texts,
    tools=st.lists(sound_tools, max_size=2),
    tool_choice=st.sampled_from(["none", "auto", None]),
    parallel_tool_calls=st.booleans(),
    stream=st.booleans(),
    stream_options=sound_of(include_usage=st.booleans()),
    max_tokens=st.integers(1, 10**30),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 2**31 - 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop=st.one_of(texts, st.lists(texts, max_size=3)),
    logprobs=st.booleans(),
    return_token_ids=st.booleans(),
    metadata=scalars,
)
conversations = st.one_of(
    st.lists(sound_messages, min_size=1, max_size=4),
    st.lists(messages, max_size=4),
    st.builds(lambda asked, used: [*asked, *used], st.lists(sound_messages, max_size=2), used),
    st.builds(lambda some, last: [*some, last], st.lists(messages, max_size=3), sound_messages),
)


def body(request: dict[str, Any], conversation: Any) -> bytes:
    return json.dumps({**request, "messages": conversation}).encode()  # lone surrogates as escapes


def cut_or_changed(content: bytes, place: int, byte: int) -> bytes:
    place %= len(content) + 1
    return content[:place] if byte < 0 else content[:place] + bytes([byte]) + content[place + 1 :]


def with_corpus(test: Callable[..., None]) -> Callable[..., None]:
    for path in CORPUS:
        test = example(content=path.read_bytes(), follow=True)(test)
    return test


# --- and what comes of it ---------------------------------------------------------------------------------------------


@with_corpus
@settings(max_examples=scaled(40, 20_000))
@given(
    content=st.builds(body, st.one_of(sound_requests, sound_requests, requests), conversations), follow=st.booleans()
)
def test_a_request_of_any_shape_is_refused_or_answered(server: Server, content: bytes, follow: bool) -> None:
    try_out(server, content, follow=follow)


@example(offered=[{"function": {"name": "add", "description": "long " * 2_000}}] * 2, conversation=ASK)
@settings(max_examples=scaled(8, 2_000))
@given(offered=st.lists(sound_tools, min_size=1, max_size=2), conversation=conversations)
def test_tools_of_any_schema_can_be_called_in_every_format(
    formats_server: Server, offered: Any, conversation: Any
) -> None:
    try_out(formats_server, body({"tools": offered}, conversation))


@pytest.mark.slow
@with_corpus
@settings(max_examples=scaled(60, 20_000))
@given(content=st.builds(body, st.one_of(sound_requests, requests), conversations), follow=st.booleans())
def test_a_models_own_chat_template_changes_nothing_of_that(
    models_server: Server, content: bytes, follow: bool
) -> None:
    try_out(models_server, content, follow=follow)


@settings(max_examples=scaled(25, 5_000))
@given(
    content=st.one_of(
        st.binary(max_size=200),
        anything.map(lambda value: json.dumps(value).encode()),
        st.builds(cut_or_changed, st.builds(body, requests, conversations), st.integers(0), st.integers(-1, 255)),
    )
)
def test_a_body_that_is_no_request_is_refused(server: Server, content: bytes) -> None:
    try_out(server, content)


latin = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=20)
headers = st.dictionaries(
    st.sampled_from(
        ["Authorization", "Host", "Origin", "Content-Type", "Content-Encoding", "Transfer-Encoding", "Expect", "Accept",
         "Content-Length", "Connection", "Upgrade", "X-Api-Key"]
    ),
    st.one_of(
        st.sampled_from(
            ["", "Bearer", "Bearer x", "localhost", "evil.example", "[::1]:80", "[", "gzip", "identity", "chunked",
             "null", "100-continue", "close", "websocket", "application/json; charset=utf-7", "-1", "5", "1" * 30]
        ),
        latin,
    ),
    max_size=4,
)  # fmt: skip


async def sent_raw(server: Server, head: list[str], content: bytes) -> bytes:
    """All that comes back for a request that no client library would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.gateway.port)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1") + content)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


@example(given_headers={"Expect": "\x80"}, method="POST", path="{own}/models", keyed=False, content=b"")
@example(given_headers={"Expect": "\x80"}, method="POST", path="/nowhere", keyed=False, content=b"")
@settings(max_examples=scaled(40, 10_000))
@given(
    given_headers=headers,
    method=st.sampled_from(["POST", "GET", "DELETE", "OPTIONS", "PUT", "HEAD", "post", "é"]),
    path=st.one_of(
        st.sampled_from(["{own}/chat/completions", "{own}/models", "{rollout}", "{rollout}/finish", "/rollouts", "//",
                         "/health", "/", "/v1/models", "{own}/../finish", "{rollout}%2f..%2f/finish", "*"]),
        latin.map("/{}".format),
    ),
    keyed=st.booleans(),
    content=st.one_of(st.just(b'{"messages": [{"role": "user", "content": "q"}]}'), st.binary(max_size=40)),
)  # fmt: skip
def test_a_request_with_any_headers_is_refused_or_answered_and_reaches_nothing_else(
    server: Server, given_headers: dict[str, str], method: str, path: str, keyed: bool, content: bytes
) -> None:
    end, other = server.opened(), server.opened()
    rollout = f"/rollouts/{end.rollout_id}"
    path = path.replace("{own}", f"{rollout}/v1").replace("{rollout}", rollout)
    known = {"Host": "localhost", "Content-Length": str(len(content)), "Connection": "close"}
    if keyed:
        known["Authorization"] = f"Bearer {end.api_key}"
    head = [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in {**known, **given_headers}.items())]
    answer = server.run(sent_raw(server, head, content))
    status = int(answer.split(b" ", 2)[1]) if answer else 0
    assert status < 500, answer
    own = server.gateway.trajectory(end.rollout_id)  # which nobody but the harness may finish
    assert len(own.turns) <= 1
    assert server.gateway.trajectory(other.rollout_id).turns == []
    if own.turns:
        assert status == 200
        assert keyed
    for one in (end, other):
        server.gateway.discard(one.rollout_id)


steps = st.tuples(
    st.integers(0, 5),  # which conversation to go on with, of those that were answered; a new one beyond them
    st.sampled_from(["on", "again", "another", "retold", "hang up"]),
    st.booleans(),  # whether as a stream
)


@settings(max_examples=scaled(15, 3_000))
@given(st.lists(steps, min_size=1, max_size=8))
def test_conversations_that_branch_repeat_and_break_off_in_any_order_are_recorded_to_the_token(
    server: Server, walk: list[tuple[int, str, bool]]
) -> None:
    end = server.opened()
    known: list[list[Any]] = []
    turns = 0
    for number, (which, what, stream) in enumerate(walk):
        conversation = list(known[which]) if which < len(known) else []
        if what == "retold" and conversation:
            conversation[-1] = {**conversation[-1], "content": "something else"}
        if what != "again" or not conversation:
            conversation = [*conversation, {"role": "user", "content": what if what == "on" else f"{what} {number}"}]
        else:
            conversation = conversation[:-1]
        request = {"messages": conversation, "stream": stream}
        if what == "hang up":
            server.run(broken_off(server, end, json.dumps(request).encode()))
            turns = len(server.gateway.trajectory(end.rollout_id).turns)
            continue
        answer = server.run(server.send(end, json.dumps(request).encode()))
        assert require_sound(answer)
        if not stream:
            known.append([*conversation, answer.json()["choices"][0]["message"]])
        turns = max(turns + 1, len(server.gateway.trajectory(end.rollout_id).turns))
    trajectory = server.gateway.finish(end.rollout_id, reward=1.0)
    require_exact(trajectory, len(trajectory.turns))
    assert len(trajectory.turns) >= sum(what != "hang up" for _, what, _ in walk)
    tokenizer = ScriptedPolicy([]).tokenizer
    for conversation in known:  # whatever was answered stands in one sequence, whole and in order
        said = [str(message.get("content") or "") for message in conversation]
        assert any(
            all(text in written for text in said)
            for written in (tokenizer.decode(sequence.ids) for sequence in trajectory.sequences)
        )


async def broken_off(server: Server, end: Any, content: bytes) -> None:
    """Send a request and hang up at once."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.gateway.port)
    path = "/" + end.base_url.split("/", 3)[3]
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    writer.write(f"{head}Authorization: Bearer {end.api_key}\r\n\r\n".encode() + content)
    await asyncio.sleep(0)
    writer.transport.abort()
    await asyncio.sleep(0.002)
