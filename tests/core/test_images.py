"""Images: from a user's object to a task, and back from JSON."""

import base64
import io
import json
import struct
import zlib

import pytest

from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.messages import Image, parse_content, text_with_image_labels
from agentfly.core.task import Task, to_tasks
from agentfly.core.trajectory import Trajectory

Pillow = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'agentfly-rl[images]'")


def png(width=3, height=2, kind="PNG", colour=(200, 10, 10)):
    file = io.BytesIO()
    Pillow.new("RGB", (width, height), colour).save(file, format=kind)
    return file.getvalue()


def wide_png(width, height):
    """The beginning of a PNG, which says its size: more is not read before that is known."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def asking(*parts):
    return Task([{"role": "user", "content": list(parts)}], {"answer": "red"})


def image_in(task):
    return next(part["image"] for part in task.messages[0]["content"] if part["type"] == "image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_file_is_what_its_bytes_say_whatever_it_is_called(tmp_path, kind):
    file = tmp_path / "picture.dat"
    file.write_bytes(png(kind=kind))
    image = Image.of(file)
    assert (image.data, image.media_type) == (png(kind=kind), f"image/{kind.lower()}")
    image.check()


def test_all_ways_of_giving_an_image_come_to_the_same_task(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(png())
    url = Image(png()).url
    ways = [
        {"type": "image", "image": Image(png())},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": file},
        {"type": "image", "image": url},
        {"type": "image", "image": Pillow.open(io.BytesIO(png()))},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
    ]
    tasks = to_tasks([asking({"type": "text", "text": "Which colour?"}, way) for way in ways])
    pixels = [Pillow.open(io.BytesIO(image_in(task).data)).tobytes() for task in tasks]
    assert pixels == [pixels[0]] * len(ways)
    assert len({task.id for task in tasks if image_in(task).data == png()}) == 1


def test_a_task_with_images_is_the_same_after_it_was_saved():
    task = asking({"type": "text", "text": "Which?"}, {"type": "image", "image": Image(png())})
    assert Task.from_row(json.loads(json.dumps(task.to_row()))) == task
    trajectory = Trajectory("r", "g", task, messages=task.messages)
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


def test_tasks_that_differ_by_a_pixel_have_other_ids():
    red, blue = (asking({"type": "image", "image": Image(png(colour=one))}) for one in ((200, 10, 10), (10, 10, 200)))
    assert red.id != blue.id


def test_images_of_a_file_of_tasks_are_looked_for_beside_it(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png())
    prompt = [{"role": "user", "content": [{"type": "image", "image": "pictures/a.png"}]}]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    [task] = to_tasks(tmp_path / "tasks.jsonl")
    assert image_in(task) == Image(png())


def test_a_content_of_texts_only_is_a_text():
    assert parse_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert parse_content(None) == ""


def test_people_read_a_label_where_an_image_stands():
    content = parse_content([{"type": "text", "text": "Look:"}, {"type": "image", "image": Image(bytes(12_345))}])
    assert text_with_image_labels(content) == "Look:\n[image: image/png, 12 kB]"


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image", "image": "https://example.org/a.png"}, "fetched from nowhere.*Download it"),
        ({"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}, "fetched from nowhere"),
        ({"type": "image", "image": "nowhere.png"}, "no image at nowhere.png"),
        ({"type": "image", "image": 3}, "int is no image"),
        ({"type": "image", "image": "data:text/plain;base64,YQ=="}, "data URL"),
        ({"type": "image", "image": "data:image/png;base64,###"}, "damaged"),
        ({"type": "sound", "sound": "a.wav"}, "A part of the content is .*sound"),
        ("text", "A part of the content is 'text'"),
    ],
)
def test_a_part_that_is_neither_text_nor_image_is_refused(part, why):
    with pytest.raises(ConfigError, match=why):
        asking(part)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (Image(b"no picture"), "holds no picture"),
        (Image(base64.b64encode(png())), "holds no picture.*neither decoded nor as text"),
        (Image(png(), "image/jpeg"), "is image/png by its bytes"),
        (Image(wide_png(6000, 6000)), "has 6000 x 6000 pixels, more than 33,554,432.*Make it smaller"),
        (Image(wide_png(13_000, 13_000)), "13000 x 13000 pixels|too many pixels"),
        (Image(wide_png(20_000, 20_000)), "too many pixels"),
        (Image(png(64, 64)[:60]), "cannot be read as a picture.*cut off"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bytes_that_are_no_picture_or_too_large_a_one_are_refused_before_a_run(image, why):
    with pytest.raises(UsageError, match=why):
        image.check()
    with pytest.raises(ConfigError, match=why):
        to_tasks([asking({"type": "image", "image": image})])
