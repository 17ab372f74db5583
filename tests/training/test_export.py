"""Exported models: plain Hugging Face directories equal to their checkpoints, complete or absent."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentfly as af
from agentfly.cli import main as cli
from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.policies.catalog import resolve_model
from agentfly.policies.load import load_policy
from agentfly.training import export as export_module
from agentfly.training.export import ExportMismatch, export
from agentfly.training.sft.sft import sft

AGENT = af.Agent(model="tiny", max_turns=1)


@af.reward
def fine() -> float:
    return 1.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run that trained all weights and one that trained adapters, with two checkpoints each."""
    home = tmp_path_factory.mktemp("runs")
    policy = af.ScriptedPolicy(["It is low."])
    output = asyncio.run(af.run(AGENT, ["How is tea?", "How is rice?"], reward=fine, policy=policy)).trajectories
    for name, settings in (("whole", {}), ("lora", {"lora": {"rank": 4}})):
        sft(
            AGENT, output, run_dir=home / name, progress=False, learning_rate=1e-2, eval_fraction=0.0, epochs=2,
            dtype="float32", threads=1, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
    return {name: home / name for name in ("whole", "lora")}


def logprobs(model) -> torch.Tensor:
    ids = torch.tensor([[1, 344, 202, 5, 9, 100, 7, 44, 300, 12]])
    with torch.no_grad():
        return model(input_ids=ids).logits.float().log_softmax(-1)


def plain(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_the_exported_model_has_no_adapters_and_the_same_log_probs(runs, kind, tmp_path):
    done = export(runs[kind], tmp_path / "model")
    assert done.source.name == "step-000002"
    assert done.difference < 1e-4
    assert not (tmp_path / "model" / "trainer").exists()
    assert not (tmp_path / "model" / "adapter").exists()
    reference = load_policy(done.source, dtype="float32").model
    ours, before = logprobs(plain(tmp_path / "model")), logprobs(plain(resolve_model("tiny")))
    assert torch.allclose(ours, logprobs(reference), atol=1e-4)
    assert not torch.allclose(ours, before, atol=1e-2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(resolve_model("tiny")).chat_template


def test_an_earlier_checkpoint_and_a_checkpoint_itself_can_be_exported(runs, tmp_path):
    by_step = export(runs["whole"], tmp_path / "one", step=1)
    by_path = export(runs["whole"] / "checkpoints" / "step-000001", tmp_path / "other")
    assert by_step.source == by_path.source
    assert torch.equal(logprobs(plain(by_step.path)), logprobs(plain(by_path.path)))
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7\. It has 1, 2"):
        export(runs["whole"], tmp_path / "none", step=7)


def test_peft_loads_an_exported_adapter_on_its_base_model(runs, tmp_path):
    from peft import PeftModel

    done = export(runs["lora"], tmp_path / "adapter", adapter=True)
    assert done.base == resolve_model("tiny").resolve()
    assert not list(done.path.glob("model*.safetensors"))
    with_adapter = PeftModel.from_pretrained(plain(done.base), str(done.path)).eval()
    merged = export(runs["lora"], tmp_path / "merged")
    assert torch.allclose(logprobs(with_adapter), logprobs(plain(merged.path)), atol=1e-4)
    with pytest.raises(ConfigError, match="no adapter"):
        export(runs["whole"], tmp_path / "none", adapter=True)


def test_the_weights_are_written_in_the_format_that_is_asked_for(runs, tmp_path):
    done = export(runs["whole"], tmp_path / "half", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(done.path, dtype="auto", local_files_only=True).dtype == torch.bfloat16
    assert 0 < done.difference < 0.5


def test_an_export_with_different_log_probs_is_removed(runs, tmp_path, monkeypatch):
    write_model = export_module.write_model  # type: ignore[attr-defined]

    def spoiled(path, model, tokenizer):
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        write_model(path, model, tokenizer)

    monkeypatch.setattr(export_module, "write_model", spoiled)
    with pytest.raises(ExportMismatch, match="was removed again"):
        export(runs["whole"], tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_exported_files_have_the_permissions_of_their_directory(runs, tmp_path):
    done = export(runs["whole"], tmp_path / "model")
    readers = done.path.stat().st_mode & 0o444
    assert {path.stat().st_mode & 0o444 for path in done.path.iterdir()} == {readers}


def test_nothing_is_written_over(runs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export(runs["whole"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="neither a model nor a checkpoint"):
        export(tmp_path, tmp_path / "model")


def test_a_shipped_model_is_exported_by_its_name_to_where_a_link_leads(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert export("tiny", tmp_path / "link").path == tmp_path / "disk"
    assert (tmp_path / "link" / "config.json").is_file()


def test_a_directory_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrerequisiteError, match=r"file/model cannot be written: Not a directory\. Name another"):
        export("tiny", tmp_path / "file" / "model")


def test_the_command_prints_the_directory_of_the_model(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["agentfly", "export", str(runs["whole"]), "--to", str(tmp_path / "model")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, None)
    assert f"model: {tmp_path / 'model'}" in capsys.readouterr().out
