"""``python -m benchmarks.studies STUDY``: compare training runs that differ in one setting, with several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.cli.main import run_function
from agentfly.core.errors import ConfigError, suggest_name, type_of

if TYPE_CHECKING:
    from benchmarks.studies.study import Study


def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="chain-vs-step, grpo-vs-gigpo or retokenization; or your own, as path/file.py:NAME.",
        ),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Fields to override in all runs.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm, with the seeds 1, 2, …")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Number of concurrent runs, each with one CPU thread.")] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the files; studies/STUDY by default.")
    ] = None,
) -> None:
    """Compare training methods: make the runs of a study, its table and its curves.

    Finished runs in DIR are not repeated, and interrupted runs are resumed. DIR then contains the runs, curves.svg,
    table.md and findings.json.
    """
    from agentfly.core import signals
    from benchmarks.studies.picture import draw, require_matplotlib
    from benchmarks.studies.results import StudyResults
    from benchmarks.studies.run_study import run_study

    chosen = _study(name)
    out = out or Path("studies") / chosen.name
    require_matplotlib()

    def report(line: str) -> None:
        typer.echo(line, err=True)

    runs = signals.run_until_signal(
        run_study(chosen, out, seeds=seeds, workers=workers, words=words or (), report=report)
    )
    findings = StudyResults.of(chosen, runs)
    draw(chosen, runs, out / "curves.svg")
    (out / "table.md").write_text(findings.as_markdown() + "\n", encoding="utf-8")
    (out / "findings.json").write_text(json.dumps(findings.as_json(), indent=2) + "\n", encoding="utf-8")
    typer.echo(findings.as_markdown())
    report(f"{out}: curves.svg, table.md, findings.json, and the runs")


def _study(name: str) -> Study:
    """Return the study with this name, or the one that a reference names.

    Raises:
        ConfigError: there is no such study.
    """
    from agentfly.core.references import load_reference
    from benchmarks.studies.catalog import STUDIES
    from benchmarks.studies.study import Study

    if ":" not in name:
        if name not in STUDIES:
            raise ConfigError(f"There is no study {name!r}. {suggest_name(name, sorted(STUDIES))}")
        return STUDIES[name]
    found = load_reference(name, base=Path.cwd(), field="study")
    if not isinstance(found, Study):
        raise ConfigError(f"{name} is {type_of(found)}, not a Study.")
    return found


if __name__ == "__main__":
    run_function(study)
