"""Task files: each supported kind is read, and a file that does not match its suffix is an error."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentfly.core.errors import ConfigError
from agentfly.core.task import to_tasks
from tests.support.scale import scaled

ROWS = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": 'say "hi",\nplease', "answer": "héllo"}]


def texts(path):
    return [{"prompt": task.prompt, **task.fields} for task in to_tasks(path)]


def test_a_csv_file_has_a_header_line(tmp_path):
    file = tmp_path / "tasks.csv"
    file.write_text('prompt,answer\n2 + 2?,4\n"say ""hi"",\nplease",héllo\n', encoding="utf-8")
    assert texts(file) == ROWS
    (tmp_path / "tasks.tsv").write_text("prompt\tanswer\n2 + 2?\t4\n")
    assert texts(tmp_path / "tasks.tsv") == ROWS[:1]


def test_a_json_file_is_a_list(tmp_path):
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(ROWS, indent=2))
    assert texts(file) == ROWS


def test_a_parquet_file_is_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'agentfly-rl[data]'")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "tasks.parquet")
    assert texts(tmp_path / "tasks.parquet") == ROWS
    (tmp_path / "tasks.jsonl").write_bytes((tmp_path / "tasks.parquet").read_bytes())
    with pytest.raises(ConfigError, match=r"is a parquet file. Let its name end in \.parquet"):
        to_tasks(tmp_path / "tasks.jsonl")


def test_a_byte_mark_at_the_beginning_is_no_part_of_the_file(tmp_path):
    (tmp_path / "tasks.csv").write_text("prompt\nhello\n", encoding="utf-8-sig")
    assert texts(tmp_path / "tasks.csv") == [{"prompt": "hello"}]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.jsonl", '{"prompt": "a"}\n{"prompt": "caf\xe9"}\n'.encode("latin-1"), r"line 2 is not UTF-8 text.*Save"),
        ("t.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "is UTF-16 or UTF-32 text. Save it as UTF-8"),
        ("t.jsonl", '{"prompt": "a"}\n'.encode("utf-16-le"), "is UTF-16 or UTF-32 text. Save it as UTF-8"),
        ("t.jsonl", '{"prompt": "a"}\n'.encode("utf-32-be"), "is UTF-16 or UTF-32 text. Save it as UTF-8"),
        ("t.jsonl", b"prompt,answer\na,b\n", r"line 1 is not a JSON object.*\.csv"),
        ("t.jsonl", b"[" * 100_000, "line 1 is not a JSON object"),
        ("t.json", b'{"prompt": "a"}', r"holds a dict at its top.*put \[ before it and \] behind it"),
        ("t.json", b'{"data": [{"prompt": "a"}]}', "Leave the list under 'data' alone in the file"),
        ("t.json", b'"a"', r"holds a str at its top.*Write \[\{…\}, \{…\}\]"),
        ("t.json", b'{"prompt": "a"}\n{"prompt": "b"}', r"is not JSON.*call it \.jsonl"),
        ("t.json", b"[1]", "row 1 is not a JSON object but an int"),
        ("t.csv", b"prompt,answer\na,b,c\n", "line 2 has another number of cells"),
        ("t.csv", b"prompt,answer\na\n", "line 2 has another number of cells"),
        ("t.csv", b'prompt\n"a"b\n', "line 2 is not CSV"),
        ("t.csv", b'"prompt"s\na\n', "line 1 is not CSV"),
        ("t.csv", b"prompt;answer\na;b\n", "separated by semicolons, where a file called .csv has commas"),
        ("t.csv", b"prompt\tanswer\na\tb\n", "separated by tabs.*call it by the ending that fits"),
        ("t.tsv", b"prompt,answer\na,b\n", "separated by commas, where a file called .tsv has tabs"),
        ("t.csv", b"question text\na\n", "needs a field 'prompt'"),
        ("t.csv", b"", "holds no task"),
        ("t.csv", b"\nprompt\na\n", "begins with a blank line"),
        ("t.parquet", b"nothing of the kind", "is not a parquet file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_told(tmp_path, name, content, told):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="pip install 'agentfly-rl[data]'")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        to_tasks(tmp_path / name)


def parquet_of(columns, names, path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'agentfly-rl[data]'")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names=names), path)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("t.jsonl", b'{"prompt": "a"}\n{"prompt": "a", "answer": 1, "answer": 2}\n', "line 2"),
        ("t.jsonl", b'{"prompt": "a", "facts": [{"answer": 1, "answer": 2}]}\n', "line 1"),
        ("t.json", b'[{"prompt": "a", "answer": 1, "answer": 2}]', ""),
        ("t.csv", b"prompt,answer,answer\na,1,2\n", "The header line of"),
        ("t.parquet", None, ""),
    ],
)
def test_a_row_with_two_values_of_one_name_is_refused_and_none_is_lost(tmp_path, name, content, place):
    if content is None:
        parquet_of([["a"], [1], [2]], ["prompt", "answer", "answer"], tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"has the name 'answer' more than once.*Rename or remove") as refusal:
        to_tasks(tmp_path / name)
    assert place in str(refusal.value)


def test_a_value_of_a_parquet_file_that_python_cannot_hold_is_told(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'agentfly-rl[data]'")
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    parquet_of([pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)], ["prompt"], tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"holds a value behind row 0 that Python cannot hold.*Write that column"):
        to_tasks(tmp_path / "t.parquet")


@settings(max_examples=scaled(60, 20_000))
@given(content=st.binary(max_size=200), ending=st.sampled_from(["jsonl", "json", "csv", "tsv", "txt"]))
@example(content=b'{"prompt": "\\ud800"}', ending="jsonl")
@example(content=b'{"prompt": NaN}', ending="jsonl")
@example(content=b"prompt\n\0\n", ending="csv")
@example(content=b"prompt,prompt\na,b\n", ending="csv")
@example(content=b'{"prompt": "a", "id": {"x": 1e999}}', ending="jsonl")
def test_any_bytes_are_tasks_or_a_clear_refusal(tmp_path_factory, content, ending):
    file = tmp_path_factory.getbasetemp() / f"any.{ending}"
    file.write_bytes(content)
    try:
        tasks = to_tasks(file)
    except ConfigError as error:
        assert str(file) in str(error)  # noqa: PT017
    else:
        assert all(json.dumps(task.to_row()) for task in tasks)


def test_a_text_in_place_of_a_list_of_prompts_is_told_what_a_list_looks_like():
    with pytest.raises(ConfigError, match=r"no file .What is 6 times 7\?..*\['What is 6 times 7\?'\]"):
        to_tasks("What is 6 times 7?")


def test_a_directory_in_place_of_a_file_of_tasks_is_named_as_one(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"' is a directory, not a file of tasks\. Give"):
        to_tasks(tmp_path)
