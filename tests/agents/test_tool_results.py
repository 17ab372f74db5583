"""Images in tool results, and the limit on the length of observations."""

from __future__ import annotations

import io
from typing import Any

import pytest

from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import ToolDefinitionError, ToolError
from agentfly.core.messages import Image
from agentfly.core.truncation import TokenTruncator, truncate_by_characters

numpy = pytest.importorskip("numpy", reason="comes with the extra 'train'")
Pillow = pytest.importorskip("PIL.Image", reason="pip install pillow")

PNG = Image(b"\x89PNG...", "image/png")


async def result_of(value: Any, context: Context) -> ToolResult:
    @tool
    def look() -> Any:
        """Look."""
        return value

    return await look.call({}, context)


@pytest.mark.parametrize(
    "picture", [Pillow.new("RGB", (3, 2), "red"), numpy.full((2, 3, 3), (255, 0, 0), dtype="uint8")], ids=["pil", "np"]
)
async def test_a_picture_that_a_tool_returns_is_shown_to_the_model(picture: Any, context: Context) -> None:
    result = await result_of(picture, context)
    assert result.observation == ""
    (image,) = result.images
    shown = Pillow.open(io.BytesIO(image.data))
    assert (image.media_type, shown.size, shown.getpixel((0, 0))) == ("image/png", (3, 2), (255, 0, 0))


async def test_a_list_may_mix_texts_and_images_which_keep_their_order(context: Context) -> None:
    other = Image(b"other", "image/jpeg")
    result = await result_of(["before", PNG, "between", other, {"after": 1}], context)
    assert result.observation == 'before\n[image 1]\nbetween\n[image 2]\n{"after": 1}'
    assert result.images == (PNG, other)
    assert (await result_of(["look:", PNG], context)).observation == "look:"


async def test_a_result_has_an_image_or_several_beside_its_text(context: Context) -> None:
    assert (await result_of(ToolResult("seen", image=PNG), context)).images == (PNG,)
    both = await result_of(ToolResult(["seen", PNG], 1.0, image=[PNG, PNG]), context)
    assert (both.observation, both.images, both.reward) == ("seen", (PNG, PNG, PNG), 1.0)


async def test_an_image_with_too_many_pixels_is_the_tools_failure_and_told_to_the_model(context: Context) -> None:
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("1", (6000, 6000)).save(file, format="PNG")
    for value in (Image(file.getvalue()), ToolResult("seen", image=Image(file.getvalue()))):
        with pytest.raises(ToolError, match="6000 x 6000 pixels, more than 33,554,432"):
            await result_of(value, context)


async def test_what_is_no_image_is_refused_with_the_cure(context: Context) -> None:
    with pytest.raises(ToolDefinitionError, match=r"holds 'a.png', which is no image. Give an image of PIL"):
        await result_of(ToolResult("", image="a.png"), context)


async def test_a_list_of_numbers_in_an_array_is_no_picture(context: Context) -> None:
    assert (await result_of(numpy.arange(3, dtype="uint8"), context)).images == ()


# --- the limit in tokens -------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode(errors="replace")


def parts(text: str) -> tuple[str, int, str]:
    head, _, rest = text.partition("\n[... ")
    number, _, tail = rest.partition(" characters left out ...]\n")
    return head, int(number), tail


@pytest.mark.parametrize("text", ["abc", "", "x" * 20, "é" * 10])
def test_what_fits_stays_as_it_is(text: str) -> None:
    assert TokenTruncator(Bytes())(text, 20) == text


@pytest.mark.parametrize("limit", [1, 2, 7, 50])
@pytest.mark.parametrize(
    "text", ["x" * 1000, "aé𝄞" * 400, "\ufffd" * 90, "word " * 300], ids=["ascii", "unicode", "unknown", "words"]
)
def test_what_is_longer_keeps_head_and_tail_within_the_limit(text: str, limit: int) -> None:
    head, excluded, tail = parts(TokenTruncator(Bytes())(text, limit))
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + excluded + len(tail) == len(text)
    assert limit - 8 < len((head + tail).encode()) <= limit


class Lossy(Bytes):
    """One whose decoding does not give back what was encoded, as those do that fold the case."""

    def decode(self, ids: Any) -> str:
        return super().decode(ids).upper()


def test_a_tokenizer_that_does_not_give_texts_back_is_good_enough_to_count_with() -> None:
    head, _, tail = parts(TokenTruncator(Lossy())("abc" * 1000, 60))
    assert ("abc" * 1000).startswith(head)
    assert 40 < len(head + tail) <= 60


class Counted(Bytes):
    def __init__(self) -> None:
        self.seen = 0

    def encode_text(self, text: str) -> list[int]:
        self.seen += len(text)
        return super().encode_text(text)


def test_a_very_long_text_costs_no_more_than_what_is_kept_of_it() -> None:
    coder = Counted()
    TokenTruncator(coder)("x" * 5_000_000, 100)
    assert coder.seen < 10_000


async def test_a_tool_says_how_many_tokens_of_it_the_model_is_given(context: Context) -> None:
    @tool(max_output_tokens=10)
    def dump(fails: bool) -> list[object]:
        """Dump."""
        if fails:
            raise ToolError("y" * 1000)
        return ["x" * 1000, PNG]

    cut = TokenTruncator(Bytes())
    result = await dump.call({"fails": False}, context, truncate=cut)
    assert result.observation == "xxxxx\n[... 990 characters left out ...]\nxxxxx"
    assert result.images == (PNG,)  # the text is cut, and its image stays with it
    with pytest.raises(ToolError, match=r"^yyyyy\n\[... 990 characters left out ...\]\nyyyyy$"):
        await dump.call({"fails": True}, context, truncate=cut)
    assert len((await dump.call({"fails": False}, context)).observation) < 100


def test_without_a_tokenizer_four_characters_count_as_one() -> None:
    assert truncate_by_characters("x" * 40, 10) == "x" * 40
    assert parts(truncate_by_characters("x" * 41, 10)) == ("x" * 20, 1, "x" * 20)
