"""YAML files load, or are refused with a position, in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentfly.cli.config_file import RunConfig, config_text, load_config
from agentfly.core.errors import ConfigError
from agentfly.core.yaml_reader import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read_yaml
from tests.support.scale import scaled

PLAIN = (str, int, float, bool, type(None))

PIECES = [
    *(
        "agent: a.py:agent\n",
        "tasks: t.jsonl\n",
        "training:\n",
        "  steps: 5\n",
        "  lora: {rank: 4}\n",
        "policy: vllm\n",
    ),
    *("model: ", "reward: ", "directory: ", "memory: {kind: window}\n", "sft:\n", "policy:\n", "  base_url: x\n"),
    *(
        "- ",
        "  ",
        "\n",
        ": ",
        "? ",
        ", ",
        "[",
        "]",
        "{",
        "}",
        "|\n",
        ">-\n",
        "#",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "'",
        '"',
    ),
    *("&a ", "*a", "&b ", "*b", "<<: *a\n", "!!int ", "!!float ", "!!binary ", "!!set ", "!!omap ", "!!timestamp "),
    *(
        "!!python/object/apply:os.system ",
        "!x ",
        "!<tag:x> ",
        "%TAG ! tag:x,2000:\n",
        "!!str ",
        "!!map ",
        "!!seq ",
        "!!null ",
    ),
    *(
        "2026-13-99",
        "2001-01-01T00:00:00Z",
        "12:30:45",
        ".inf",
        ".nan",
        "-.inf",
        "1e999",
        "0x_",
        "0b",
        "0o8",
        "._",
        "1__0",
        "=",
    ),
    *(
        "9" * 300,
        "0b" + "1" * 300,
        "yes",
        "off",
        "~",
        "null",
        "1: 2\n",
        "null: 1\n",
        "[a]: b\n",
        "{a: b}: c\n",
        "true: x\n",
    ),
    *(
        '"\\0"',
        '"\\ud800"',
        '"\\U99999999"',
        '"\\xff"',
        '"\\z"',
        "\t",
        "\r",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ud7ff",
        "\U0001f469",
    ),
    *(
        "${oc.env:HOME}",
        "${oc.env:NO_SUCH_NAME}",
        "${oc.env:A,b}",
        "${model}",
        "${",
        "$${",
        "${${oc.env:HOME}}",
        "${oc.create:}",
    ),
]
"""What YAML texts and configurations are made of, sound and unsound."""

TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
KEYS = st.sampled_from([*RunConfig.model_fields, "steps", "kl", "x", "", "kind", "base_url", "algorithm"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers() | st.none(), inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=6).map(lambda value: yaml.dump(value, allow_unicode=True))


def refusal(call: Callable[[], Any]) -> str:
    """What a call is refused with, by the typed error and by no other; empty if it is not refused."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def require_loaded_or_refused(path: Path, text: bytes, *overrides: str) -> None:
    """Load a file. What comes of it is a configuration that can be saved, or a short error that names the file."""
    path.write_bytes(text)
    if told := refusal(lambda: load_config(path, overrides)):
        assert any(name in told for name in (str(path), *overrides, *map(repr, overrides)))
        assert len(told) < 20_000
        return
    config = load_config(path, overrides)
    path.write_text(config_text(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "config.yaml"


@settings(max_examples=scaled(60, 30_000))
@given(text=st.binary(max_size=200))
@example(text=b"\xff\xfea\x00")
@example(text=b"agent: \xff\n")
@example(text=b"agent: a\x00b\n")
def test_any_bytes_load_or_are_refused(file, text):
    require_loaded_or_refused(file, text)


@settings(max_examples=scaled(150, 100_000))
@given(text=TEXTS)
def test_any_yaml_or_nearly_yaml_loads_or_is_refused(file, text):
    require_loaded_or_refused(file, text.encode("utf-8", errors="surrogatepass"))


@settings(max_examples=scaled(60, 30_000))
@given(text=DOCUMENTS, override=TEXTS)
@example(text="training: {steps: 10000000000000000000000000000000000000000}\nagent: a\n", override="x")
@example(text="training: {learning_rate: 1e999}\nagent: a\n", override="training.seed=.nan")
def test_any_document_and_any_override_load_or_are_refused(file, text, override):
    require_loaded_or_refused(file, text.encode(), override)
    require_loaded_or_refused(file, b"agent: a\n" + text.encode())


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(one) for key, one in value.items())
    return all(map(plain, value)) if isinstance(value, list) else type(value) in PLAIN


@settings(max_examples=scaled(100, 50_000))
@given(text=TEXTS)
def test_what_is_read_is_plain_and_what_is_not_is_told_with_its_place(text):
    told = refusal(lambda: read_yaml(text.encode("utf-8", errors="surrogatepass"), "the file"))
    if told:
        assert re.match(r"the file(, line \d+(, column \d+)?)? (is not YAML|cannot be read): .+\.", told, re.DOTALL)
    else:
        assert plain(read_yaml(text, "the file"))


BOMB = "a: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"k{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
MERGED = "a: &a0 {x: 1}\n" + "".join(
    f"k{level}: &a{level}\n  <<: [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
LADDER = "a: &a0 [x]\n" + "".join(f"k{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 2_000))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, f"line 4, column .* more than {MAX_VALUES} values"),
        (MERGED, f"more than {MAX_VALUES} values"),
        (LADDER, f"more than {MAX_DEPTH} deep"),
        ("a: &a [*a]\n", r"line 1, column 8 cannot be read: \*a stands within what it stands for"),
        ("a: &a\n  <<: *a\n", r"line 2, column 7 cannot be read: \*a stands within"),
        ("[" * 100_000, f"line 1, column {MAX_DEPTH + 1} cannot be read: .* more than {MAX_DEPTH} deep"),
        ("- " * 50_000, f"more than {MAX_DEPTH} deep"),
        ("{a: " * 20_000, f"more than {MAX_DEPTH} deep"),
        ("? " * 50_000, f"more than {MAX_DEPTH} deep"),
        ("x" * (MAX_BYTES + 1), f"longer than {MAX_BYTES} bytes"),
        ("a: " + "9" * 5_000, "line 1, column 4 cannot be read: a number has more than 100 characters"),
        ("a: 0b" + "1" * 100_000, "a number has more than 100 characters"),
        ("a: " + "1:" * 50_000 + "1", None),
        ("a:\n" + "  - x\n" * (MAX_VALUES + 1), f"more than {MAX_VALUES} values"),
        ("a: b\nc: 2\na: d\n", "line 3, column 1 is not YAML: found duplicate key a"),
        ("a: b\n1: 2\n", "line 2, column 1 cannot be read: a key has to be a text: write '1', in quotes"),
        ("yes: 2\n", "a key has to be a text: write 'yes', in quotes"),
        ("[a]: 2\n", "a key has to be a text"),
        ("a: !!binary aGk=\n", "line 1, column 4 is not YAML: could not determine a constructor"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: !!int soon\n", "line 1, column 4 is not YAML: found a value that is no int"),
        ('a: "\\0"\n', "line 1, column 4 cannot be read: a text holds a character"),
        ('a: "\\U99999999"\n', "is not YAML"),
        ("a: b\n\0", "line 2 is not YAML: it holds a character"),
        (b"a: b\nc: \xff\n", "line 2 cannot be read: it is not UTF-8"),
    ],
)
def test_what_would_cost_much_or_means_nothing_is_refused_at_its_place(text, told):
    if told is None:
        assert plain(read_yaml(text, "the file"))
        return
    with pytest.raises(ConfigError, match=told):
        read_yaml(text, "the file")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1_000", 1000),
        ("010", 10),
        ("0x1F", 31),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("off", False),
        ("", None),
        ("{a: &x {b: 1}, c: {<<: *x, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("[&x [1], *x]", [[1], [1]]),
        ("\ufeffa: é".encode(), {"a": "é"}),
        ("a: é".encode("utf-16"), {"a": "é"}),
    ],
)
def test_values_are_read_as_people_mean_them(text, value):
    assert read_yaml(text, "the file") == value


def test_environment_variables_fill_texts_and_the_sign_for_them_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", "${not.again}")
    path = tmp_path / "config.yaml"
    path.write_text("agent: a\nmodel: ${oc.env:FOLDER}/$${x}\nrun_dir: ${oc.env:NOT_SET,runs}\n")
    config = load_config(path)
    assert (config.model, config.run_dir) == ("${not.again}/${x}", "runs")
    path.write_text(config_text(config))
    assert load_config(path) == config
    for text, told in (
        ("${model}", "is not a reference to a variable. Write"),
        ("${oc.env:NOT_SET}", "the environment variable 'NOT_SET' is not set"),
    ):
        path.write_text(f"agent: a\nmodel: {text}\n")
        with pytest.raises(ConfigError, match=r"model=.*" + re.escape(told)):
            load_config(path)
