"""A fake vLLM server that serves the paths a policy uses, and fails on request.

Its "model" gives every token the log-prob of minus the ``bias`` of its weights, and samples ids counted up from the
prompt's last. So the log-probs show which weights a server has loaded.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentfly.testing.fake_openai_server import FakeOpenAIServer, ReceivedRequest, raw_reply

CONTEXT = 100
"""Tokens that the model holds."""

STARTED = "default"


class FakeVLLMServer(FakeOpenAIServer):
    """One server. Leaving it is its death; after `restart` it is what its supervisor has started in its place.

    Attributes:
        faults: words that say how it misbehaves; see where they are looked for.
        free: whether generations come to their end; cleared, they wait.
        bias: of the weights it serves.
        adapters: what each adapter adds to that.
        generated: the bodies of the requests to sample, as they came.
        running: how many are being sampled.
        aborted: how many were not sampled to their end, because whoever asked had gone.
    """

    def __init__(self, *how: str) -> None:
        super().__init__()
        self.default_reply = self._answer_one
        self.faults = set(how)
        self.free = asyncio.Event()
        self.free.set()
        self.generated: list[dict[str, Any]] = []
        self.running = 0
        self.aborted = 0
        self.restart()

    def restart(self) -> None:
        """Serve what a fresh server does."""
        self.bias = 1.0
        self.label = STARTED
        self.adapters: dict[str, float] = {}
        self.paused = False

    def asked(self, path: str) -> int:
        """How many requests came for a path."""
        return sum(request.path.partition("?")[0] == path for request in self.requests)

    async def _answer_one(self, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        path = request.path.partition("?")[0]
        if path != "/inference/v1/generate":
            answer = self._control(path, request.body or {})
        elif "no token ids" in self.faults:
            await raw_reply(404, {"error": {"message": "Not Found"}})(request, writer)
            return
        else:
            answer = await self._generate(request.body)
        await raw_reply(200, answer)(request, writer)

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/v1/models":
                return {"data": [{"id": "tiny", "max_model_len": CONTEXT}]}
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/weight_info":
                return {"weight_version": self.label}
            case "/collective_rpc":
                return {"results": [self._load(body["kwargs"].get("weights_path"))]}
            case "/v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = float(Path(body["lora_path"], "bias").read_text())
            case "/reset_prefix_cache":
                return {"success": True}
        return {}

    def _load(self, directory: str | None) -> dict[str, Any]:
        if "cannot load" in self.faults:
            return {"error": "RuntimeError: shapes do not fit"}
        if "loads nothing" not in self.faults:
            self.bias = 1.0 if directory is None else _read_bias(Path(directory) / "model.safetensors")
        return {"loaded": 1}

    async def _generate(self, body: dict[str, Any]) -> Any:
        sampling, prompt = body["sampling_params"], body["token_ids"]
        if "prompt_logprobs" in sampling:
            scores = [{str(one): {"logprob": -self._bias(body)}} for one in prompt[1:]]
            return {"prompt_logprobs": [None, *scores]}
        if "logprob_token_ids" in sampling:
            told = [{"token_id": one, "logprob": -self._bias(body)} for one in sampling["logprob_token_ids"]]
            return {"choices": [{"logprobs": {"content": [{"top_logprobs": told}]}}]}
        self.generated.append(body)
        self.running += 1
        try:
            return await self._sample(body, sampling, prompt)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def _bias(self, body: dict[str, Any]) -> float:
        return self.bias + self.adapters.get(body["model"], 0.0)

    async def _sample(self, body: dict[str, Any], sampling: dict[str, Any], prompt: list[int]) -> Any:
        first = self.label
        await self.free.wait()
        while self.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        ids = list(_ids(prompt[-1], sampling))
        half = 0 if first == self.label else len(ids) // 2
        spans = [{"version": first, "start": 0, "end": half}] if half else []
        spans.append({"version": self.label, "start": half, "end": len(ids)})
        cut = sampling["top_k"] == 1 and "raw log-probs" not in self.faults
        of_cut = math.log(0.5) if "ties" in self.faults else 0.0
        logprobs = [{"token_id": one, "logprob": of_cut if cut else -self._bias(body)} for one in ids]
        stopped = ids[-1] in sampling["stop_token_ids"]
        aborted = "aborts once" in self.faults and not cut
        if aborted:
            self.faults.remove("aborts once")
        choice = {
            "token_ids": ids[:4] if "loses ids" in self.faults and not cut else ids,
            "finish_reason": "abort" if aborted else "stop" if stopped else "length",
            "logprobs": {"content": logprobs},
            "weight_versions": spans,
        }
        images = {"prompt_token_ids": _expanded(prompt)} if "content_parts" in body else {}
        read = len(images.get("prompt_token_ids", prompt))
        return {"choices": [choice], "usage": {"prompt_tokens": read, "completion_tokens": len(ids)}, **images}


def _ids(last: int, sampling: dict[str, Any]) -> Iterator[int]:
    for one in range(last + 1, last + 1 + sampling["max_tokens"]):
        yield one
        if one in sampling["stop_token_ids"]:
            return


def _expanded(prompt: list[int]) -> list[int]:
    """A prompt with three placeholders in the place of each one: the id 2."""
    return [one for placeholder in prompt for one in [placeholder] * (3 if placeholder == 2 else 1)]


def save_bias(directory: Path, bias: float) -> Path:
    """Weights of the stand-in, in a directory as safetensors are (one tensor of one float32)."""
    directory.mkdir(exist_ok=True)
    header = json.dumps({"bias": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", bias))
    return directory


def save_adapter(directory: Path, bias: float) -> Path:
    """An adapter of the stand-in, which adds to the bias."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "bias").write_text(str(bias))
    return directory


def _read_bias(path: Path) -> float:
    bias: float = struct.unpack("<f", path.read_bytes()[-4:])[0]
    return bias
