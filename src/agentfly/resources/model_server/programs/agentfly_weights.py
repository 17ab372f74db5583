"""A worker extension of vLLM that replaces the weights of a served model in place.

vLLM loads it with ``--worker-extension-cls agentfly_weights.WeightsInPlace``, with the directory of this file in
``PYTHONPATH``. vLLM's own ``reload_weights`` keeps old weights on CPUs: the output layer multiplies by a packed copy of
its matrix, which ``reload_weights`` does not rebuild although it reports success.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class WeightsInPlace:
    """Methods added to a worker of vLLM."""

    def load_weights_in_place(self, weights_path: str | None = None) -> dict[str, Any]:
        """Serve other weights of the same model from now on.

        Args:
            weights_path: a directory with safetensors files; None restores those of the server's start.

        Returns:
            ``loaded``, the number of tensors read; or ``error``, what went wrong. It is not raised, because a worker
            that raises may take the server with it.
        """
        worker: Any = self
        try:
            loaded = _load(worker, weights_path)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"loaded": loaded}


def _load(worker: Any, directory: str | None) -> int:
    if directory is None:
        worker.reload_weights()
        loaded = 0
    else:
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{directory} has no safetensors files, as seen from the server")
        names: list[str] = []
        worker.reload_weights(weights_iterator=_tensors(files, names))
        loaded = len(names)
    _pack_again(worker.model_runner.get_model())
    return loaded


def _tensors(files: list[Path], names: list[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is not a mapping)
                names.append(name)
                yield name, tensors.get_tensor(name)


def _pack_again(model: Any) -> None:
    """Rebuild the packed copies of embedding and output matrices, on platforms that have such copies."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
