"""Images with the image processors and chat templates of real models: as many placeholders as the model fills."""

from __future__ import annotations

import gc
import io
import json
import shutil
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoProcessor, AutoTokenizer
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import agentfly as af
from agentfly.core.errors import UsageError
from agentfly.core.messages import Image
from agentfly.formats.chat.chat_format import RenderedTokens
from agentfly.policies.catalog import resolve_model
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.hf_vision import HFVision
from agentfly.rollouts.agent_runtime import chat_format_of

Pillow = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'agentfly-rl[images]'")

pytestmark = pytest.mark.slow

HOME = Path(__file__).parents[2] / ".test-tokenizers"
SIZES = [(28, 28), (57, 84), (300, 200), (31, 400)]


def picture(width: int, height: int) -> Image:
    file = io.BytesIO()
    Pillow.new("RGB", (width, height), (200, 10, 10)).save(file, format="PNG")
    return Image(file.getvalue())


def model_directory(path: Path, vocabulary: str, template: str, config: dict[str, Any]) -> Path:
    """A directory as of a model, its weights left out."""
    if not (HOME / "manifest.json").is_file():
        pytest.skip("needs tokenizers of well-known models: python scripts/fetch_tokenizers.py")
    shutil.copytree(HOME / vocabulary, path, dirs_exist_ok=True)
    shutil.copy(HOME / "templates" / "trl" / f"{template}.jinja", path / "chat_template.jinja")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    config = {"model_type": "qwen2_5_vl", "image_token_id": 151655, "video_token_id": 151656, "vision_config": {}}
    path = model_directory(tmp_path_factory.mktemp("qwen"), "qwen2.5", "qwen2_5_vl", config)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64})
    processor.save_pretrained(path)
    return HFTokenizer.load(path)


@pytest.fixture(scope="module")
def idefics(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    path = model_directory(tmp_path_factory.mktemp("idefics"), "smollm2", "smolvlm", {})
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<fake_token_around_image>", "<image>", "<global-img>", *tiles]}
    )
    tokenizer.chat_template = (path / "chat_template.jinja").read_text()
    images = Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template).save_pretrained(path)
    config = {
        "model_type": "idefics3",
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "vision_config": {},
        "text_config": {"model_type": "llama"},
    }
    (path / "config.json").write_text(json.dumps(config))
    return HFTokenizer.load(path)


@af.tool
def photograph(of: str) -> af.ToolResult:
    """Take a photograph.

    Args:
        of: what.
    """
    return af.ToolResult(of, image=picture(57, 84))


def shown(role: str, *parts: Any, **fields: Any) -> Any:
    made = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": made, **fields}


def conversation(tokenizer: HFTokenizer) -> tuple[RenderedTokens, RenderedTokens]:
    """A question with two images, and a result with one in answer to a call."""
    agent = af.Agent(model="m", tools=[photograph], system_prompt="You see.")
    chat = chat_format_of(agent, tokenizer)
    view = [
        {"role": "system", "content": agent.system_message()},
        shown("user", "Spelled: <|image_pad|><image>", picture(28, 28), "and", picture(300, 200)),
    ]
    prompt = chat.render_prompt(view)
    [call] = agent.parse_calls(agent.format.write("photograph", {"of": "a cat"}))
    answer = agent.result_message(call, "a cat")
    answers = [
        {**answer, "content": [{"type": "text", "text": answer["content"]}, *shown("", picture(57, 84))["content"]]}
    ]
    turn = agent.assistant_message("", [call])
    after = [*prompt.ids, *tokenizer.encode_text("Look."), chat.stop_ids[0]]
    rest = chat.render_continuation(answers, after=after, conversation=[*view, turn, *answers])  # type: ignore[arg-type, list-item]
    assert rest is not None
    return prompt, rest


def test_qwen_fills_as_many_placeholders_as_its_grid_has_cells(qwen: HFTokenizer) -> None:
    assert qwen.vision is not None
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64})
    for size in SIZES:
        grid = processor(images=[Pillow.new("RGB", size)], return_tensors="np")["image_grid_thw"][0]
        assert qwen.vision.ids(picture(*size)) == (151655,) * (grid.prod() // 4)


def test_what_is_kept_of_images_that_were_shown_is_their_ids_alone(tmp_path: Path) -> None:
    class Watched(af.Image):
        """An image that can be seen to go."""

    config = {"model_type": "qwen2_5_vl", "image_token_id": 151655, "video_token_id": 151656, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}).save_pretrained(tmp_path)
    vision = HFVision(tmp_path, cast("Any", None))
    image = Watched(picture(57, 84).data)
    ids, shown = vision.ids(image), weakref.ref(image)
    assert vision.ids(picture(57, 84)) is ids
    assert vision.ids(picture(200, 84)) != ids
    del image
    gc.collect()
    assert shown() is None


def test_ids_that_only_images_have_are_known_from_the_configuration(qwen: HFTokenizer) -> None:
    assert qwen.vision is not None
    assert {151652, 151655, 151656} <= set(qwen.vision.reserved_ids)
    assert not set(qwen.eos_ids) & set(qwen.vision.reserved_ids)


def test_a_conversation_with_qwen_has_its_images_in_their_places(qwen: HFTokenizer) -> None:
    assert qwen.vision is not None
    for rendered in conversation(qwen):
        spans = [at for placed in rendered.images for at in range(placed.start, placed.stop)]
        assert spans == [at for at, one in enumerate(rendered.ids) if one == 151655]
        for placed in rendered.images:
            assert tuple(rendered.ids[placed.start : placed.stop]) == qwen.vision.ids(placed.image)
            around = qwen.decode([rendered.ids[placed.start - 1], rendered.ids[placed.stop]])
            assert around == "<|vision_start|><|vision_end|>"
    prompt, rest = conversation(qwen)
    assert [len(rendered.images) for rendered in (prompt, rest)] == [2, 1]
    assert "Spelled: <|image_pad|><image>" in qwen.decode(prompt.ids)


def test_the_processor_of_the_model_makes_the_same_ids_of_a_conversation(idefics: HFTokenizer) -> None:
    prompt, rest = conversation(idefics)
    assert [len(rendered.images) for rendered in (prompt, rest)] == [2, 1]
    processor = AutoProcessor.from_pretrained(idefics.hf.name_or_path, local_files_only=True, backend="pil")
    for rendered in (prompt, rest):
        pieces = [list(rendered.ids)]
        for placed in reversed(rendered.images):
            whole = pieces.pop()
            pieces += [whole[placed.stop :], [processor.image_token_id], whole[: placed.start]]
        collapsed = [one for piece in reversed(pieces) for one in piece]
        text = idefics.decode(collapsed).replace("Spelled: <|image_pad|><image>", "Spelled:")
        pictures = [Pillow.open(io.BytesIO(placed.image.data)) for placed in rendered.images]
        again = processor(text=[text], images=[pictures], add_special_tokens=False)["input_ids"][0]
        spelled = idefics.decode(rendered.ids).replace("Spelled: <|image_pad|><image>", "Spelled:")
        assert idefics.decode(again) == spelled
        spans = [tuple(rendered.ids[placed.start : placed.stop]) for placed in rendered.images]
        assert idefics.vision is not None
        assert spans == [tuple(idefics.vision.ids(placed.image)) for placed in rendered.images]


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (Image(b"no picture"), "cannot be read as a picture"),
        (picture(2000, 4), "does not accept .*aspect ratio"),
        (picture(6000, 6000), "more than 33,554,432"),
    ],
)
def test_an_image_that_the_model_cannot_be_shown_is_refused(qwen: HFTokenizer, image: Image, why: str) -> None:
    assert qwen.vision is not None
    with pytest.raises(UsageError, match=why):
        qwen.vision.ids(image)


def test_the_template_may_stand_beside_the_tokenizer_as_json(tmp_path: Path) -> None:
    path = model_directory(tmp_path, "smollm2", "smolvlm", {})
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").unlink()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert HFTokenizer.load(path).chat_template == template


def test_a_model_without_eyes_has_no_vision() -> None:
    assert HFTokenizer.load(resolve_model("tiny")).vision is None
