"""ModelServerSpec: a language model and the server on this machine that samples from it."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentfly.resources.kind import ResourceKind
from agentfly.resources.spec import EnvironmentVariables, ResourceSpec, normalize_env

if TYPE_CHECKING:
    from agentfly.resources.model_server.server import ModelServer  # noqa: F401  (named in the base class)

PYTHON_VARIABLE = "AGENTFLY_VLLM_PYTHON"
_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


@dataclass(frozen=True, kw_only=True)
class ModelServerSpec(ResourceSpec["ModelServer"]):
    """A language model behind an OpenAI-compatible server that is started on this machine.

    The server listens on the loopback interface only, at a port that the system picks and no other program can take
    during its life. It requires a key, which is new for each instance.

    Args:
        model: a directory in the Hugging Face format, or the model's name on the hub.
        engine: ``"vllm"``, or the absolute path of a Python program that serves the OpenAI API on the socket that it
            inherits (see `agentfly.resources.model_server.vllm_command` for its arguments).
        python: the interpreter that has the engine, or the directory of its virtual environment. None uses
            ``$AGENTFLY_VLLM_PYTHON`` when the server starts, or else the interpreter of this program.
        device: where the model runs; ``"auto"`` becomes ``"gpu"`` if the machine has a driver for graphics processors,
            and otherwise ``"cpu"``.
        tensor_parallel: number of devices that each layer is split over.
        pipeline_parallel: number of devices that the layers are divided among.
        data_parallel: number of copies of the model.
        gpu_memory_utilization: fraction of each device's memory that the engine may use, keys and values included.
        kv_cache: size of the memory for keys and values of each device, as bytes or a text such as ``"4GiB"``; 0 leaves
            it to ``gpu_memory_utilization``.
        context_length: maximum number of tokens of prompt and answer together; None for the model's own limit.
        dtype: the type of weights and activations, for instance ``"bfloat16"``; ``"auto"`` uses the model's own.
        max_num_seqs: maximum number of sequences that are sampled concurrently; None leaves it to the engine.
        adapters: maximum number of LoRA adapters that are loaded at once; 0 turns adapters off.
        adapter_rank: the highest rank of an adapter.
        seed: seeds the engine.
        arguments: further arguments of the engine's command line, one text each.
        env: environment variables of the server, as a mapping or as pairs, in addition to those of this process. Values
            may be secrets; the spec's repr hides them.
        served_model_name: the model's name in requests; empty uses the last part of ``model``.
        restarts: maximum number of restarts within ``restart_window_s`` before the instance counts as broken.
        restart_window_s: length of that window in seconds.
        health_timeout_s: maximum number of seconds for an answer to a health check. A server that does not answer and
            has not ended this many seconds later is killed and restarted.
        call_timeout_s: maximum number of seconds of one request, including the wait for a restart.
        max_log_bytes: number of bytes kept from the end of the server's log.

    For the device ``"gpu"``, ``gpus`` is by default the product of the three kinds of parallelism. Servers with a
    smaller value share devices. All model servers of the user coordinate which devices each gets, unless ``env`` sets
    ``CUDA_VISIBLE_DEVICES``.

    Raises:
        ConfigError: a field has an invalid value.
    """

    kind = ResourceKind(
        "model server",
        "agentfly.resources.model_server.server:ModelServer",
        reap="agentfly.resources.process.supervised:reap",
    )

    model: str
    capacity: int = 1
    start_timeout_s: float = 900.0
    reset_timeout_s: float = 60.0
    release_timeout_s: float = 20.0
    idle_timeout_s: float | None = 900.0
    engine: str = "vllm"
    python: str | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache: int | str = 0
    context_length: int | None = None
    dtype: str = "auto"
    max_num_seqs: int | None = None
    adapters: int = 0
    adapter_rank: int = 16
    seed: int = 0
    arguments: tuple[str, ...] = ()
    env: EnvironmentVariables = ()
    served_model_name: str = ""
    restarts: int = 3
    restart_window_s: float = 600.0
    health_timeout_s: float = 10.0
    call_timeout_s: float = 600.0
    max_log_bytes: int | str = 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_model()
        self._check_numbers()
        self._check_words()
        normalize_env(self)
        if self.device == "auto":
            object.__setattr__(self, "device", "gpu" if any(path.exists() for path in _GPU_DRIVERS) else "cpu")
        if self.device == "gpu" and not self.gpus:
            object.__setattr__(self, "gpus", float(self.devices))
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", self.model.rstrip("/").rpartition("/")[2])

    @property
    def start_weight(self) -> int:
        """Four: it loads its libraries and a model."""
        return 4

    @property
    def label(self) -> str:
        """``model server`` and the name that the model is served under."""
        return f"model server:{self.served_model_name}"

    @property
    def devices(self) -> int:
        """Number of devices that the server runs on."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    def interpreter(self) -> str:
        """The path of the Python that runs the engine. It is checked at the start."""
        chosen = self.python or os.environ.get(PYTHON_VARIABLE) or sys.executable
        path = Path(chosen).expanduser()
        return str(path / "bin" / "python" if path.is_dir() else path)

    def _check_model(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip("/") or "\0" in self.model:
            raise self._field_error("model", "write a directory with a model, or a model's name on the hub")
        if self.engine != "vllm" and not (isinstance(self.engine, str) and self.engine.startswith("/")):
            raise self._field_error("engine", "there is 'vllm'; a program of your own is given by its absolute path")
        self._require_one_of("device", "auto", "cpu", "gpu")

    def _check_numbers(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "adapter_rank"):
            self._require_int(name, least=1)
        for name in ("adapters", "seed", "restarts"):
            self._require_int(name, least=0)
        for name in ("context_length", "max_num_seqs"):
            if getattr(self, name) is not None:
                self._require_int(name, least=1, otherwise=", or None to leave it to the engine")
        for name in ("restart_window_s", "health_timeout_s", "call_timeout_s"):
            self._require_seconds(name)
        if not (_is_real(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1):
            raise self._field_error(
                "gpu_memory_utilization", "write a share above 0 and of at most 1, for instance 0.9"
            )
        self._require_size("kv_cache")
        if self._require_size("max_log_bytes") < 4096:
            raise self._field_error("max_log_bytes", "the end of a log says too little below 4096 bytes")

    def _check_words(self) -> None:
        for name in ("dtype", "served_model_name"):
            self._require_str(name)
        if self.python is not None:
            self._require_str("python")
        if isinstance(self.arguments, str):
            words = ", ".join(map(repr, shlex.split(self.arguments)))
            raise self._field_error("arguments", f"write a tuple with one text a word: ({words},)")
        self._normalize_tuple("arguments")
        if not all(_is_word(word) for word in self.arguments):
            raise self._field_error("arguments", "write a tuple of texts: numbers too are text there")


def _is_word(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
