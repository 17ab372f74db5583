"""ModelServerSpec: its settings, refusals, display, and command line."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.resources.model_server import spec as spec_module
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.model_server.vllm_command import probe_vllm, server_command, server_environment
from agentfly.resources.scheduler.budget import cost_of


def options(spec: ModelServerSpec) -> dict[str, str]:
    """The options on a server's command line that have a value."""
    words = server_command(spec, 7)[3:]
    return {name: value for name, value in pairwise(words) if name.startswith("--") and not value.startswith("--")}


def test_a_spec_is_a_key_that_travels() -> None:
    spec = ModelServerSpec(model="/models/m", arguments=("--enforce-eager",), env=(("HF_TOKEN", "t"),))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert (
        len({spec, ModelServerSpec(model="/models/m", arguments=("--enforce-eager",), env=(("HF_TOKEN", "t"),))}) == 1
    )
    assert spec != ModelServerSpec(model="/models/m", arguments=("--enforce-eager",), env=(("HF_TOKEN", "u"),))


def test_a_server_without_vllm_says_in_its_log_how_to_get_it() -> None:
    with socket.socket() as listener:
        program = server_command(ModelServerSpec(model="m"), listener.fileno())[1]
        ended = subprocess.run(
            [sys.executable, "-I", "-S", program, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert "has no vLLM" in ended.stderr
    assert "AGENTFLY_VLLM_PYTHON" in ended.stderr


def test_the_values_of_the_environment_are_not_shown() -> None:
    shown = repr(ModelServerSpec(model="m", env=(("HF_TOKEN", "hf_very_secret"),)))
    assert "HF_TOKEN" in shown
    assert "hf_very_secret" not in shown


def test_the_name_that_is_served_comes_from_the_model() -> None:
    assert ModelServerSpec(model="/models/tiny/").served_model_name == "tiny"
    assert ModelServerSpec(model="org/Model-1B").served_model_name == "Model-1B"
    assert ModelServerSpec(model="org/Model-1B", served_model_name="judge").label == "model server:judge"


def test_a_server_takes_as_many_gpus_as_it_is_spread_over_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_module, "_GPU_DRIVERS", (tmp_path / "driver",))
    assert cost_of(ModelServerSpec(model="m", tensor_parallel=2))[2] == 0
    (tmp_path / "driver").touch()
    spread = ModelServerSpec(model="m", tensor_parallel=2, pipeline_parallel=2, data_parallel=3)
    assert spread.device == "gpu"
    assert cost_of(spread)[2] == 12_000
    assert cost_of(ModelServerSpec(model="m", gpus=0.5))[2] == 500
    assert cost_of(ModelServerSpec(model="m", device="cpu"))[2] == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": ""}, "write a directory with a model"),
        ({"model": "/"}, "write a directory with a model"),
        ({"engine": "vlm"}, "there is 'vllm'"),
        ({"device": "tpu"}, "write 'auto', 'cpu' or 'gpu'"),
        ({"tensor_parallel": 0}, "at least 1"),
        ({"context_length": 0}, "or None to leave it to the engine"),
        ({"gpu_memory_utilization": 90}, "a share above 0"),
        ({"kv_cache": "4 gigs"}, "not a size"),
        ({"restarts": -1}, "at least 0"),
        ({"health_timeout_s": 0}, "seconds above 0"),
        ({"max_log_bytes": 10}, "4096"),
        ({"arguments": "--dtype 'a b'"}, r"\('--dtype', 'a b'\)|\('--dtype', 'a b',\)"),
        ({"arguments": ("--seed", 1)}, "numbers too are text"),
        ({"env": 3}, "write a mapping"),
        ({"env": (("A", 1),)}, "item 0 is not a pair of texts"),
        ({"env": (("A=B", "c"),)}, "cannot be the name"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelServerSpec(**{"model": "m", **fields})  # type: ignore[arg-type]


def test_a_refusal_does_not_show_the_values_of_the_environment() -> None:
    with pytest.raises(ConfigError) as refused:
        ModelServerSpec(model="m", env=(("TOKEN", "hf_very_secret", 3),))  # type: ignore[arg-type]
    assert "hf_very_secret" not in str(refused.value)


def test_fields_become_options_of_the_server_and_arguments_come_last() -> None:
    spec = ModelServerSpec(
        model="/m/x",
        tensor_parallel=2,
        context_length=4096,
        max_num_seqs=16,
        kv_cache="2GiB",
        adapters=3,
        adapter_rank=5,
        arguments=("--dtype", "float16"),
    )
    told = options(spec)
    assert told["--model"] == "/m/x"
    assert told["--served-model-name"] == "x"
    assert told["--tensor-parallel-size"] == "2"
    assert told["--max-model-len"] == "4096"
    assert told["--max-num-seqs"] == "16"
    assert told["--kv-cache-memory-bytes"] == str(2 * 2**30)
    assert told["--max-lora-rank"] == "8"
    assert "--enable-lora" in server_command(spec, 7)
    assert server_command(spec, 7)[-2:] == ["--dtype", "float16"]


def test_what_is_not_asked_is_left_to_the_engine() -> None:
    told = server_command(ModelServerSpec(model="m", device="gpu"), 7)
    assert not {"--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes", "--enable-lora"} & {*told}


def test_the_key_is_not_on_the_command_line() -> None:
    spec = ModelServerSpec(model="m")
    assert "the-key" in server_environment(spec, "the-key").values()
    assert "the-key" not in server_command(spec, 7)


def test_another_interpreter_does_not_get_the_module_path_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/here")
    assert "PYTHONPATH" not in server_environment(ModelServerSpec(model="m", python="/other/bin/python"), "")
    asked = ModelServerSpec(model="m", python="/other/bin/python", env=(("PYTHONPATH", "/there"),))
    assert server_environment(asked, "")["PYTHONPATH"] == "/there"
    assert server_environment(ModelServerSpec(model="m", python=sys.executable), "")["PYTHONPATH"] == "/here"


def test_the_interpreter_is_the_one_asked_for_or_else_the_one_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLY_VLLM_PYTHON", str(tmp_path))
    assert ModelServerSpec(model="m").interpreter() == str(tmp_path / "bin" / "python")
    assert ModelServerSpec(model="m", python="/a/python3").interpreter() == "/a/python3"
    monkeypatch.delenv("AGENTFLY_VLLM_PYTHON")
    assert ModelServerSpec(model="m").interpreter() == sys.executable


def test_an_interpreter_without_vllm_is_told_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match=r"cannot be run.*AGENTFLY_VLLM_PYTHON"):
        probe_vllm(str(tmp_path / "python"))
    lacking = tmp_path / "lacking"
    lacking.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    lacking.chmod(0o755)
    with pytest.raises(PrerequisiteError, match=r"has no vLLM.*pip install vllm"):
        probe_vllm(str(lacking))
