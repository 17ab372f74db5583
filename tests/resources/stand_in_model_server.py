"""A fake model server: speaks the protocol of `agentfly.resources.model_server.vllm_command`, and can misbehave.

    python stand_in_model_server.py LISTENER OPTION...

``$STAND_IN`` holds words that say how: see `main`. What it "samples" are the last ids of the prompt, counted up.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = os.environ["AGENTFLY_SERVER_KEY"]
HOW = os.environ.get("STAND_IN", "").split(",")
adapters: dict[str, str] = {}
label = "default"
weights = None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self):
        if "never healthy" in HOW:
            return self.answer(503, {"error": {"message": "loading"}})
        if not self.allowed():
            return self.answer(401, {})
        if self.path == "/health":
            return self.answer(200, {})
        if self.path == "/weight_info":
            return self.answer(200, {"weight_version": label, "weights": weights})
        names = ["stand-in", *adapters]
        return self.answer(200, {"data": [{"id": name} for name in names]})

    def do_POST(self):
        if not self.allowed():
            return self.answer(401, {})
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            return self.complete(body)
        if self.path == "/inference/v1/generate":
            return self.generate(body)
        if self.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": '{"reason": "it is right", "score": 0.75}'}
            return self.answer(200, {"choices": [{"message": message, "finish_reason": "stop"}]})
        if self.path == "/v1/load_lora_adapter":
            adapters[body["lora_name"]] = body["lora_path"]
        if self.path == "/v1/unload_lora_adapter":
            del adapters[body["lora_name"]]
        if self.path == "/update_weight_version":
            globals().update(label=body["new_version"])
        if self.path == "/collective_rpc":
            return self.load_weights(**body["kwargs"])
        return self.answer(200, {"success": True})

    def complete(self, body):
        prompt = body["prompt"]
        if prompt == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "die once" and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "hang":
            time.sleep(3600)
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
        text = f"devices {devices}" if prompt == "your devices?" else f"pid {os.getpid()}"
        choice = {"text": text, "finish_reason": "length"}
        return self.answer(200, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    def generate(self, body):
        prompt = body["token_ids"]
        ids = [prompt[-1] + 1 + step for step in range(body["sampling_params"]["max_tokens"])]
        sent = ids[:-1] if "loses ids" in HOW else ids
        logprobs = [{"token_id": one, "logprob": -0.5} for one in sent]
        spans = [{"version": label, "start": 0, "end": len(sent)}]
        choice = {"token_ids": sent, "finish_reason": "length", "logprobs": {"content": logprobs}}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return self.answer(200, {"choices": [choice | {"weight_versions": spans}], "usage": usage})

    def load_weights(self, weights_path=None):
        if weights_path == "/not/there":
            return self.answer(200, {"results": [{"error": "FileNotFoundError: it is not there"}]})
        globals().update(weights=weights_path)
        adapters.clear()  # as vLLM does
        return self.answer(200, {"results": [{"loaded": 1}]})

    def allowed(self):
        return self.headers.get("Authorization") == f"Bearer {KEY}"

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True


def main():
    print("options:", *sys.argv[2:], flush=True)
    print(f"the key is {KEY}", flush=True)
    if "dies at once" in HOW or ("dies later" in HOW and Path("lived").exists()):
        print("ValueError: no such model", file=sys.stderr)
        sys.exit(3)
    Path("lived").touch()
    if "ignores TERM" in HOW:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "has children" in HOW:
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        print(f"child {child.pid}", flush=True)
    if "floods" in HOW:
        for number in range(50_000):
            print(f"line {number} of a server that talks too much")
        print("the last line", flush=True)
    server = Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(sys.argv[1]))
    server.server_activate()
    server.serve_forever()


if __name__ == "__main__":
    main()
