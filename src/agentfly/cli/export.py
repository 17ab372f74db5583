"""``agentfly export``: a run's model as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run, or one of its checkpoints.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Where the model goes: a new directory.")],
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", help="Of a run: the step to export; the last if not given.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, in peft's format.")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Number format of the weights; auto keeps that of the checkpoint."),
    ] = "auto",
) -> None:
    """Write the model of a run for other programs: weights with adapters merged, tokenizer and chat template.

    What was written is loaded again and compared with the checkpoint before the directory appears.
    """
    from agentfly.policies.extras import require_training_packages

    require_training_packages()
    from agentfly.training.export import export as export_model

    done = export_model(source, to, step=checkpoint, adapter=adapter, dtype=dtype)
    what = f"adapter for {done.base}" if done.adapter else "model"
    typer.echo(f"{what}: {done.path}")
    typer.echo(f"of {done.source}; its log-probs on a probe differ by at most {done.difference:.2g}")
