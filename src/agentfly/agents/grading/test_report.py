"""TestReport: which of the named tests passed, according to the report of a grading container."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.agents.grading.pytest_harness import covers


@dataclass(frozen=True)
class TestReport:
    """Which of the named tests passed.

    Attributes:
        passed: the names whose tests all passed, in all cases.
        failed: the other names: tests that failed, were skipped, or did not run.
        problem: why no test counts as passed, if the whole run failed; else empty.
        output: the end of the tests' printed output, for people. The tested code may have printed it.
        excluded: paths of the agent's work that were not graded, because they would change how tests run.
        seconds: duration of the tests.
    """

    __test__ = False  # it is no test of pytest's, whatever its name begins with

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    problem: str = ""
    output: str = ""
    excluded: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def all_passed(self) -> bool:
        """Whether every named test passed."""
        return not self.failed

    @property
    def share(self) -> float:
        """The share of the named tests that passed."""
        return len(self.passed) / (len(self.passed) + len(self.failed))

    @property
    def reward(self) -> float:
        """1 if every named test passed, else 0."""
        return float(self.all_passed)


def all_failed(names: Sequence[str], problem: str, output: str = "", seconds: float = 0.0) -> TestReport:
    """Return the report of a run in which no test counts as passed."""
    return TestReport((), tuple(names), problem, output, seconds=seconds)


def read_report(found: Mapping[str, Any], names: Sequence[str], canaries: Sequence[str], key: str) -> TestReport:
    """Return which tests passed, from the report of a grading container's supervisor.

    Args:
        found: the report of the tests, their output, their duration, and whether they were killed at the time limit.
        names: the tests that count.
        canaries: tests that cannot pass. If one passes, the tests were tampered with.
        key: the key that signs the records.
    """
    output, seconds = str(found["output"]), float(found["seconds"])
    try:
        records = _signed(str(found["report"]).encode("latin-1"), key.encode())
        ended = bool(records) and records[-1]["kind"] == "end"
        changed = [str(name) for name in records[-1]["changed"]] if ended else []
        passed = _passed(records)
        broken = [str(record["reason"]) for record in records if record["kind"] == "broken"]
    except (ValueError, LookupError, TypeError) as error:
        return all_failed(names, f"The report of the tests was tampered with: {error}.", output, seconds)
    problem = ""
    if not ended:
        why = "was killed because the time was up" if found["timed_out"] else "ended before all tests had"
        problem = f"The process of the tests {why}."
    elif changed:
        problem = f"The tested code changed pytest: {', '.join(changed)}."
    elif any(passed.get(canary) for canary in canaries):
        problem = "A test passed that cannot pass, so the tested code changed the tests."
    elif any(passed.values()) and not all(canary in passed for canary in canaries):
        problem = "The tests that cannot pass did not run, so the tested code changed the tests."
    if problem:
        return all_failed(names, problem, output, seconds)
    cases = {name: [ok for test, ok in passed.items() if covers(name, test)] for name in names}
    good = tuple(name for name in names if cases[name] and all(cases[name]))
    bad = tuple(name for name in names if name not in good)
    return TestReport(good, bad, "", "\n".join([*broken, output]), seconds=seconds)


def _signed(report: bytes, key: bytes) -> list[dict[str, Any]]:
    """Return the records of a report. An incomplete last line is dropped.

    Raises:
        ValueError: a record has a wrong signature, or follows the final record.
    """
    records: list[dict[str, Any]] = []
    before = b""
    *lines, rest = report.split(b"\n")
    for line in lines:
        signature, _, content = line.partition(b" ")
        expected = hmac.new(key, before + content, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(signature, expected):
            raise ValueError("a record is not signed")
        before = signature
        records.append(json.loads(content))
    ends = [number for number, record in enumerate(records) if record["kind"] == "end"]
    if ends and (ends[0] != len(records) - 1 or rest):
        raise ValueError("something stands behind its end")
    return records


def _passed(records: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return for each test that ran whether its set-up, its call (with all subtests) and its tear-down passed."""
    phases: dict[str, list[tuple[str, str]]] = {}
    for record in records:
        if record["kind"] == "phase":
            phases.setdefault(record["id"], []).append((record["when"], record["outcome"]))
    return {
        test: [when for when, _ in seen] == ["setup", *["call"] * (len(seen) - 2), "teardown"]
        and len(seen) > 2
        and all(outcome == "passed" for _, outcome in seen)
        for test, seen in phases.items()
    }
