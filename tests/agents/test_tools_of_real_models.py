"""Tools with real models: schemas in their chat templates, and limits in their tokens."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agentfly.agents.tool_decorator import tool
from agentfly.core.truncation import TokenTruncator

HOME = Path(__file__).parents[2] / ".test-tokenizers"
NO_OBJECTS = {"CohereForAI-c4ai-command-r-plus-tool_use.jinja"}
"""Templates that fail on any object whose properties have names; they can describe flat arguments only."""
LIBRARIES = ("trl", "axolotl", "llama.cpp")
pytestmark = pytest.mark.slow
LIGHT = ("smollm2", "qwen2.5", "mistral", "phi3.5")


def require_fetched() -> None:
    if not (HOME / "manifest.json").is_file():
        pytest.skip("needs tokenizers of well-known models: python scripts/fetch_tokenizers.py")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Node:
    x: int
    y: float = 0.0
    inner: Node | None = None


class Basket(BaseModel):
    nodes: list[Node] = []
    counts: dict[str, int] = {}


class Place(TypedDict):
    city: str


@tool
def everything(
    a: int,
    b: str | None,
    c: Colour,
    d: Node,
    e: Basket,
    f: dict[str, Any],
    g: Literal["x"],
    h: Any,
    i: tuple[int, str],
    j: int | str = 3,
    k: Place | None = None,
    m: list[list[int]] = [[1]],  # noqa: B006
    n: Node = Node(1),  # noqa: B008
) -> None:
    """Take one argument of every kind.

    Args:
        a: a number
        d: a node
    """


@tool
def nothing() -> None:
    """Take none."""


def templates(library: str) -> Iterator[Path]:
    require_fetched()
    yield from sorted((HOME / "templates" / library).glob("*.jinja"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_chat_template_that_knows_tools_can_describe_every_kind_of_argument(library: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def text(template: str, tools: list[Any] | None) -> str | None:
        special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        messages = [[{"role": "user", "content": "hi"}]]
        try:
            rendered, _ = render_jinja_template(messages, tools, chat_template=template, **special)  # type: ignore[str-unpack]
        except Exception:
            return None
        return str(rendered[0])

    shown = 0
    for path in templates(library):
        template = path.read_text(encoding="utf-8")
        if path.name in NO_OBJECTS or text(template, [nothing.definition]) is None:
            continue  # it wants what no agent gives, or another Jinja
        described = text(template, [everything.definition, nothing.definition])
        assert described is not None, path.name
        shown += "everything" in described
    assert shown >= 10


# --- limits --------------------------------------------------------------------------------------------------------


@cache
def coder(family: str) -> Any:
    require_fetched()
    from agentfly.policies.hf_tokenizer import HFTokenizer

    return HFTokenizer.load(HOME / family)


PIECES = st.sampled_from(
    [*"a\n \té語𝄞{\ufffd\u0301", "    ", "👩\u200d👩\u200d👧", "<|im_end|>", "</s>", "0123456789", "return x"]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=120).map("".join)


@pytest.mark.parametrize("family", LIGHT)
@settings(max_examples=30, deadline=None)
@given(text=TEXTS, limit=st.integers(1, 40))
def test_what_is_left_of_a_text_has_so_many_tokens_and_is_its_head_and_tail(family: str, text: str, limit: int) -> None:
    tokenizer = coder(family)
    text = text.encode(errors="replace").decode()
    shown = TokenTruncator(tokenizer)(text, limit)
    if shown == text:
        assert len(tokenizer.encode_text(text)) <= limit
        return
    head, _, rest = shown.partition("\n[... ")
    excluded, _, tail = rest.partition(" characters left out ...]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(excluded) + len(tail) == len(text)
    assert len(tokenizer.encode_text(head)) <= limit - limit // 2
    assert len(tokenizer.encode_text(tail)) <= limit // 2


@pytest.mark.parametrize("family", LIGHT)
def test_most_of_what_is_allowed_is_kept(family: str) -> None:
    tokenizer = coder(family)
    text = "".join(f"{number}: the quick brown fox, l'été, 语言 and 12345.678\n" for number in range(2000))
    head, _, rest = TokenTruncator(tokenizer)(text, 1000).partition("\n[... ")
    kept = len(tokenizer.encode_text(head)) + len(tokenizer.encode_text(rest.partition("...]\n")[2]))
    assert 980 <= kept <= 1000
