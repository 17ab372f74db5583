"""trl's side of ``python -m benchmarks.training``: a program for an environment that has trl and no AgentFly.

It takes a `TrainingWorkload` as JSON and prints a `SideResult` as JSON; see `benchmarks.training.workload`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    """Train by GRPOTrainer, and print how long each step took."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    work = json.loads(sys.argv[1])
    torch.set_num_threads(work["threads"])
    clock: list[tuple[float, float]] = []
    sampled: list[int] = []

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.append((time.perf_counter(), time.process_time()))

    def score(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.append(sum(map(len, completion_ids)))
        return [zlib.crc32(messages[-1]["content"].encode()) % 1000 / 1000 for messages in completions]

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            model_init_kwargs={"dtype": work["dtype"]},
            bf16=work["dtype"] == "bfloat16",
            use_cpu=True,
            per_device_train_batch_size=len(work["prompts"]) * work["attempts"],
            num_generations=work["attempts"],
            max_completion_length=work["sampled"],
            generation_kwargs={"min_new_tokens": work["sampled"]},
            max_steps=work["warmup"] + work["steps"],
            learning_rate=work["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            gradient_checkpointing=work["gradient_checkpointing"],
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        prompts = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in work["prompts"]]
        trainer = GRPOTrainer(
            work["model"], score, args=config, train_dataset=Dataset.from_list(prompts), callbacks=[Clock()]
        )
        trainer.train()
    seen = [0, *(int(entry["num_tokens"]) for entry in trainer.state.log_history if "num_tokens" in entry)]
    counted = range(work["warmup"], len(sampled))
    side = {
        "step_seconds": [clock[step + 1][0] - clock[step][0] for step in counted],
        "step_cpu_seconds": [clock[step + 1][1] - clock[step][1] for step in counted],
        "sampled_tokens": [sampled[step] for step in counted],
        "tokens": [seen[step + 1] - seen[step] for step in counted],
        "peak_mib": peak_mib(),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
    }
    print(json.dumps(side))


def peak_mib() -> float:
    """Return the maximum resident memory of this process in MiB. `getrusage` would include the parent process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
