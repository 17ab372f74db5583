"""Studies: which runs are compared, which values are read, and resuming of a stopped study."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from statistics import stdev
from types import ModuleType

import pytest
import yaml

from agentfly.cli.config_file import load_config
from agentfly.cli.experiment import Experiment
from agentfly.core.errors import ConfigError
from agentfly.core.run_directory import RunDirectory
from benchmarks.studies import figures
from benchmarks.studies.catalog import STUDIES
from benchmarks.studies.picture import draw
from benchmarks.studies.results import SeedSpread, StudyResults
from benchmarks.studies.run_study import RunFailed, StudyRun, run_study, study_runs
from benchmarks.studies.study import Arm, Curve, Figure, Study

ROOT = Path(__file__).parents[2]

SUCCESS = Figure("success", figures.last("success/mean", "eval"), ".0%")
STEPS_TO = Figure("steps to 50%", figures.steps_to("success/mean", 0.5), ".0f")
REWARD = Curve("reward", "reward/mean")


def study(**changes: object) -> Study:
    settings = {
        "name": "small",
        "question": "Which is better?",
        "config": "agentfly.tasks.depot:tiny.yaml",
        "arms": (Arm("one", "the one"), Arm("other", "the other", ("training.strategy=step",))),
        "curves": (REWARD, Curve("held-out success", "success/mean", "eval", log=True)),
        "figures": (SUCCESS, STEPS_TO),
        **changes,
    }
    return Study(**settings)  # type: ignore[arg-type]


def write_metrics(run: RunDirectory, *rows: tuple[str, int, dict[str, float]]) -> None:
    run.ensure()
    lines = [{"kind": kind, "step": step, "time": 0.0, "metrics": metrics} for kind, step, metrics in rows]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def finished_runs(out: Path) -> list[StudyRun]:
    """Two arms of two seeds; the second seed of the other arm never gets far."""
    runs = study_runs(study(), out, seeds=2)
    for run, after in zip(runs, (0.6, 0.8, 0.9, 0.2), strict=True):
        write_metrics(
            run.directory,
            ("eval", 0, {"success/mean": 0.1}),
            ("train", 1, {"reward/mean": 0.25, "rows/tokens": 100.0}),
            ("train", 2, {"reward/mean": 0.75, "rows/tokens": 50.0}),
            ("eval", 2, {"success/mean": after}),
        )
    return runs


# --- what a study is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"arms": (Arm("one", "one"),)}, "at least two arms"),
        ({"arms": (Arm("one", "one"), Arm("one", "other"))}, "different names"),
        ({"name": "a/b"}, "a/b"),
        ({"arms": (Arm("one", "one"), Arm("the other", "other"))}, "the other"),
    ],
)
def test_an_unknown_study_is_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        study(**changes)


def test_a_missing_configuration_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        _ = study(config=str(tmp_path / "absent.yaml")).config_file


@pytest.mark.parametrize("shipped", STUDIES.values(), ids=STUDIES)
def test_every_arm_of_the_shipped_studies_is_a_configuration_that_can_be_followed(shipped):
    for arm in shipped.arms:
        experiment = Experiment.load(load_config(shipped.config_file, [*shipped.words, *arm.words]))
        assert experiment.tasks
        assert experiment.oracle is not None


def test_the_arms_of_the_shipped_studies_differ():
    for shipped in STUDIES.values():
        assert len({(arm.program, arm.words) for arm in shipped.arms}) == len(shipped.arms)


# --- what is read in the runs -----------------------------------------------------------------------------------------


def test_figures_are_read_in_the_metrics_of_a_run(tmp_path):
    run = finished_runs(tmp_path)[0].directory
    assert figures.first("success/mean", "eval")(run) == 0.1
    assert figures.last("success/mean", "eval")(run) == 0.6
    assert figures.mean("reward/mean")(run) == 0.5
    assert figures.largest("reward/mean")(run) == 0.75
    assert figures.total("rows/tokens", per=1000)(run) == 0.15
    assert figures.steps_to("success/mean", 0.5)(run) == 2.0
    assert figures.steps_to("success/mean", 0.7)(run) is None


def test_a_metric_that_a_run_does_not_have_gives_no_figure(tmp_path):
    run = finished_runs(tmp_path)[0].directory
    readers = [figures.first, figures.last, figures.mean, figures.largest]
    assert [reader("absent")(run) for reader in readers] == [None] * 4


def test_the_interval_of_a_mean_uses_students_t():
    spread = SeedSpread.of([0.7, 0.8, 0.9])
    assert (spread.low, spread.high, spread.count) == (0.7, 0.9, 3)
    assert spread.mean == pytest.approx(0.8)
    assert spread.margin == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-4)
    for count, quantile in ((11, 2.228), (60, 2.001)):
        values = [float(number % 2) for number in range(count)]
        assert SeedSpread.of(values).margin == pytest.approx(quantile * stdev(values) / count**0.5, rel=1e-3)
    assert SeedSpread.of([0.5]).margin is None


def test_results_compare_the_arms_and_count_the_runs_with_a_figure(tmp_path):
    findings = StudyResults.of(study(), finished_runs(tmp_path))
    table = findings.as_markdown().split("\n")
    assert table[0] == "| arm | success | steps to 50% |"
    assert table[2] == "| the one | 75% (60% to 90%) | 2 (2 to 2) |"
    assert table[3] == "| the other | 50% (20% to 80%) | 2, 1 of 2 runs |"
    assert table[-1] == "| the other | 2 | 20% | - |"
    output = findings.as_json()
    assert output["arms"]["one"]["success"]["mean"] == pytest.approx(0.75)
    assert output["runs"][3] == {"arm": "other", "seed": 2, "success": 0.2, "steps to 50%": None}


@pytest.mark.slow
def test_the_same_runs_give_the_same_picture_with_every_curve_and_arm(tmp_path):
    runs = finished_runs(tmp_path)
    draw(study(), runs, tmp_path / "one.svg")
    draw(study(), runs, tmp_path / "two.svg")
    picture = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert picture == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert all(text in picture for text in ("the one", "the other", "reward", "held-out success", "training step"))


# --- the pages of results ---------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script that fills the pages, with pages of its own."""
    spec = importlib.util.spec_from_file_location("study_results", ROOT / "benchmarks/studies/publish.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_a_study_is_put_in_the_place_that_its_page_has_for_it_again_and_again(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- study: small -->\n<!-- end -->\n\nAfter.\n", encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    (out / "study.json").write_text('{"study": "small"}', encoding="utf-8")
    (out / "curves.svg").write_text("<svg/>", encoding="utf-8")
    for table in ("| old |", "| new |"):
        (out / "table.md").write_text(f"{table}\n", encoding="utf-8")
        assert script.put(out) == page
    output = page.read_text(encoding="utf-8")
    assert output == (
        "Before.\n\n<!-- study: small -->\n\n| new |\n\n![the curves of small](small.svg)\n\n<!-- end -->\n\nAfter.\n"
    )
    assert (tmp_path / "small.svg").read_text(encoding="utf-8") == "<svg/>"


def test_a_study_without_a_page_is_refused(script, tmp_path):
    (tmp_path / "study.json").write_text('{"study": "small"}', encoding="utf-8")
    (tmp_path / "table.md").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="'small'"):
        script.put(tmp_path)


def test_every_shipped_study_has_one_place_in_the_results():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/results").glob("*.md"))
    assert [pages.count(f"<!-- study: {name} -->") for name in STUDIES] == [1] * len(STUDIES)


# --- the runs ---------------------------------------------------------------------------------------------------------

TINIEST = ["training.steps=1", "training.tasks_per_step=1", "training.attempts=2", "training.eval_attempts=1"]
TINIEST += ["eval_tasks=null", "training.eval_every_steps=null", "training.checkpoint_every_steps=1"]


async def test_a_directory_of_another_study_is_refused(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "large"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="another study"):
        await run_study(study(), tmp_path, report=lambda line: None)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_failed_run_is_reported_with_its_output(tmp_path):
    (tmp_path / "broken.yaml").write_text("agent: nowhere:agent\ntasks: nowhere:tasks\n", encoding="utf-8")
    broken = study(config=str(tmp_path / "broken.yaml"))
    with pytest.raises(RunFailed, match=r"one, seed 1: [^$]*nowhere"):
        await run_study(broken, tmp_path / "out", seeds=1, report=lambda line: None)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_study_makes_the_runs_that_are_missing_and_no_others(tmp_path):
    output: list[str] = []
    runs = await run_study(study(), tmp_path, seeds=1, words=TINIEST, report=output.append)
    assert all(run.finished for run in runs)
    strategies = [load_config(run.directory.config_file).training.strategy for run in runs]
    assert strategies == ["chain", "step"]
    assert [run.directory.metrics()[0].step for run in runs] == [1, 1]

    output.clear()
    await run_study(study(), tmp_path, seeds=1, words=TINIEST, report=output.append)
    assert output == ["2 of 2 runs are finished already"]

    run = runs[0]
    settings = yaml.safe_load(run.directory.config_file.read_text())
    settings["training"]["steps"] = 9  # as if it had stopped early
    run.directory.config_file.write_text(yaml.safe_dump(settings))
    assert run.finished

    (run,) = [run for run in runs if run.arm.name == "other"]
    (run.directory.checkpoints / "step-000001").rename(tmp_path / "lost")  # as if it had been killed before
    output.clear()
    await run_study(study(), tmp_path, seeds=1, words=TINIEST, report=output.append)
    assert output == ["1 of 2 runs are finished already", "other, seed 1: started", "other, seed 1: finished"]
    assert run.finished
