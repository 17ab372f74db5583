"""Task: a prompt and further fields."""

import datetime
import json
import math

import pytest

from agentfly.core.errors import ConfigError
from agentfly.core.task import Task, to_tasks


def test_a_row_becomes_a_task_and_back():
    row = {"prompt": "2 + 2?", "answer": 4, "id": "sum"}
    task = Task.from_row(row)
    assert (task.prompt, task["answer"], task.id) == ("2 + 2?", 4, "sum")
    assert task.to_row() == row


def test_a_task_without_an_id_gets_the_same_one_every_time():
    assert Task("2 + 2?", {"answer": 4}).id == Task("2 + 2?", {"answer": 4}).id
    assert Task("2 + 2?", {"answer": 4}).id != Task("2 + 2?", {"answer": 5}).id


@pytest.mark.parametrize("row", [{"id": None}, {"id": ""}, {}])
def test_an_id_that_is_empty_is_made_of_the_content(row):
    assert Task.from_row({"prompt": "2 + 2?", "answer": 4, **row}).id == Task("2 + 2?", {"answer": 4}).id


def test_a_whole_number_is_an_id_and_becomes_text():
    assert [Task.from_row({"prompt": "a", "id": given}).id for given in (0, 7, "7")] == ["0", "7", "7"]


@pytest.mark.parametrize("given", [True, 1.5, math.nan, [1], {"x": 1}, "\ud800"])
def test_an_id_that_is_neither_text_nor_a_whole_number_is_refused(given):
    with pytest.raises(ConfigError, match="A task has the id"):
        Task.from_row({"prompt": "a", "id": given})


def test_a_text_prompt_is_one_user_message():
    assert Task("hello").messages == [{"role": "user", "content": "hello"}]


def test_a_row_without_a_prompt_is_refused_naming_its_fields():
    with pytest.raises(ConfigError, match="answer"):
        Task.from_row({"answer": 4})


@pytest.mark.parametrize("name", ["problem", "messages", "promptt"])
def test_a_row_that_calls_its_prompt_otherwise_is_told_to_rename_it(name):
    with pytest.raises(ConfigError, match=f"Rename '{name}' to 'prompt'"):
        Task.from_row({"answer": "4", "solution": "2 + 2", name: "2 + 2?"})


@pytest.mark.parametrize("one", [Task("a", {"b": 1}), {"prompt": "a", "b": 1}])
def test_one_task_is_a_list_of_one(one):
    assert to_tasks(one) == [Task("a", {"b": 1})]


def test_no_tasks_at_all_is_refused():
    with pytest.raises(ConfigError, match="no task"):
        to_tasks([])


def test_tasks_come_from_a_file(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": str(i), "answer": i}) for i in range(3)) + "\n")
    assert [task["answer"] for task in to_tasks(file)] == [0, 1, 2]


@pytest.mark.parametrize("line", ["{not json", "[1, 2]", '"text"'])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        to_tasks(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.jsonl"):
        to_tasks(tmp_path / "nothing.jsonl")


def test_a_message_without_text_has_the_empty_text():
    task = Task([{"role": "assistant", "content": None, "tool_calls": []}])
    assert task.messages == [{"role": "assistant", "content": "", "tool_calls": []}]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], "content of a message"),
        ([{"role": "user", "content": [{"type": "sound", "sound": "a"}]}], "A part of the content"),
        (["hello"], "no message"),
        (7, "no message"),
        ([{"content": "a"}], "no message"),
    ],
)
def test_a_prompt_that_is_no_conversation_is_refused(prompt, why):
    with pytest.raises(ConfigError, match=why):
        to_tasks([Task(prompt)])


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), b"bytes", {1, 2}, math.nan, {(1, 2): 3}])
def test_a_field_that_cannot_be_saved_is_named_before_anything_runs(value):
    with pytest.raises(ConfigError, match="'due'"):
        to_tasks([Task("a", {"due": value})])


def test_a_row_that_cannot_be_a_task_is_named_by_its_line(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl, line 2: .*Rename 'promt' to 'prompt'"):
        to_tasks(file)


def test_a_file_without_a_task_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no task"):
        to_tasks(tmp_path / "empty.jsonl")


def test_two_tasks_of_one_id_are_named_by_their_places_and_a_task_may_come_twice(tmp_path):
    rows = [{"prompt": "a", "id": "1"}, {"prompt": "b"}, {"prompt": "b"}, {"prompt": "a", "id": 1}]
    assert [task.prompt for task in to_tasks(rows)] == ["a", "b", "b", "a"]  # type: ignore[arg-type]
    rows.append({"prompt": "c", "id": 1})
    with pytest.raises(ConfigError, match=r"tasks\[0\] and tasks\[4\] .* the id '1'"):
        to_tasks(rows)  # type: ignore[arg-type]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n" + "\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=r"tasks\.jsonl: line 2 and line 6 .* the id '1'"):
        to_tasks(file)


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [task.prompt for task in to_tasks(file)] == ["a\u2028b\x85c"]


@pytest.mark.parametrize("tasks", [5, None, len])
def test_what_holds_no_tasks_is_refused(tasks):
    with pytest.raises(ConfigError, match="holds no tasks"):
        to_tasks(tasks)


@pytest.mark.parametrize("task", [b"x", None, 5])
def test_what_is_no_task_is_refused(task):
    with pytest.raises(ConfigError, match="is no task"):
        to_tasks([task])


@pytest.mark.parametrize("task", [Task("half \ud800 pair"), Task("a", {5: 6})])  # type: ignore[dict-item]
def test_what_a_record_could_not_hold_is_refused(task):
    with pytest.raises(ConfigError, match="cannot be saved"):
        to_tasks([task])
