"""``agentfly doctor``: which prerequisites of AgentFly this machine has, and how to get the others."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core.installation import install_command
from agentfly.viewing.formatting import pluralize

if TYPE_CHECKING:
    from agentfly.resources.containers.capabilities import Capabilities

_GIB = 2**30
_DISK_FOR_MODELS = 2 * _GIB


class CheckStatus(StrEnum):
    """The meaning of a check for the user."""

    OK = "ok"
    NOTE = "note"  # works with restrictions, or not everybody needs it
    MISSING = "missing"  # needed


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """The result of one check of this machine.

    Attributes:
        what: the subject of the check.
        verdict: its meaning for the user.
        found: what was found.
        remedy: what to do; empty if nothing.
    """

    what: str
    verdict: CheckStatus
    found: str
    remedy: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Show what this machine has, what is missing, and how to get it."""
    findings = list(diagnose())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.verdict is CheckStatus.MISSING for finding in findings):
        raise typer.Exit(1)


def diagnose() -> Iterator[MachineCheck]:
    """Check everything that AgentFly needs of a machine."""
    checks: tuple[Callable[[], MachineCheck], ...] = (
        python,
        processor,
        threads,
        memory,
        training_packages,
        gpu,
        sandbox,
    )
    for check in checks:
        yield check()
    yield from backends()
    yield model_servers()
    yield mcp_servers()
    yield model_cache()
    yield free_disk()


def python() -> MachineCheck:
    """Check the Python that runs AgentFly."""
    return MachineCheck("Python", CheckStatus.OK, f"{platform.python_version()} at {sys.executable}")


def processor() -> MachineCheck:
    """Count the cores, and name the number format in which models compute on them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineCheck(
        "processor", CheckStatus.OK, f"{pluralize(cores, 'core')}; models compute in float32 on them by default"
    )


def threads() -> MachineCheck:
    """Check how many threads PyTorch will use."""
    configured = os.environ.get("OMP_NUM_THREADS")
    load = os.getloadavg()[0]
    found = f"OMP_NUM_THREADS={configured}" if configured else "one per core"
    if not configured and load > 1.0:
        return MachineCheck(
            "threads",
            CheckStatus.NOTE,
            f"{found}, while other programs keep {load:.1f} cores busy",
            "Threads that wait for a busy core slow everything down: set OMP_NUM_THREADS to the number of free cores.",
        )
    return MachineCheck("threads", CheckStatus.OK, found)


def memory(meminfo: Path = Path("/proc/meminfo")) -> MachineCheck:
    """Check the total and free memory of the machine."""
    if not meminfo.is_file():
        return MachineCheck("memory", CheckStatus.NOTE, "unknown")
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()}
    available = sizes.get("MemAvailable", 0)
    found = f"{available / _GIB:.1f} GiB free of {sizes.get('MemTotal', 0) / _GIB:.1f} GiB"
    if available < 2 * _GIB:
        return MachineCheck(
            "memory", CheckStatus.NOTE, found, "The model 'tiny' trains in 1 GiB; larger ones need more."
        )
    return MachineCheck("memory", CheckStatus.OK, found)


def training_packages() -> MachineCheck:
    """Check the packages of the extra ``train``."""
    found, missing = [], []
    for name in ("torch", "transformers", "safetensors", "tensorboard"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return MachineCheck(
            "training packages",
            CheckStatus.NOTE,
            f"without {', '.join(missing)}",
            f"Needed to train, and to sample from a model on this machine: {install_command('train')}.",
        )
    return MachineCheck("training packages", CheckStatus.OK, ", ".join(found))


def gpu() -> MachineCheck:
    """Find the GPUs that PyTorch can use."""
    try:
        import torch
    except ImportError:
        return MachineCheck("GPU", CheckStatus.NOTE, "unknown without PyTorch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return MachineCheck("GPU", CheckStatus.OK, ", ".join(names))
    return MachineCheck("GPU", CheckStatus.OK, "none; models run on the processor")


def sandbox() -> MachineCheck:
    """Check whether tools can have a sandbox, and which backend starts it."""
    working = [able.backend for able in _backends() if able.available and not able.isolation_gaps]
    if not working:
        return MachineCheck(
            "sandbox", CheckStatus.MISSING, "none can be isolated on this machine", "See the backends below."
        )
    return MachineCheck(
        "sandbox", CheckStatus.OK, f"by {working[0]}" + (f", or {', '.join(working[1:])}" * (len(working) > 1))
    )


def backends() -> Iterator[MachineCheck]:
    """Report what each sandbox backend can do here, and how to get what is missing."""
    for able in _backends():
        remedy = "\n".join(able.missing)
        if not able.available:
            yield MachineCheck(f"  {able.backend}", CheckStatus.NOTE, "not available", remedy)
            continue
        lines = [able.description or "works", f"limits: {_limits(able)}", f"inside: {_inside(able)}"]
        if able.unaccounted_memory:
            lines.append(f"the limit on memory does not count: {'; '.join(able.unaccounted_memory)}")
        if able.isolation_gaps:
            lines.append(
                f"not isolated: {'; '.join(able.isolation_gaps)}. Taken for ContainerSpec(isolation='weak') only"
            )
        noted = bool(able.missing or able.isolation_gaps)
        yield MachineCheck(f"  {able.backend}", CheckStatus.NOTE if noted else CheckStatus.OK, "\n".join(lines), remedy)


def _backends() -> list[Capabilities]:
    from agentfly.resources.containers.backend import get_backend
    from agentfly.resources.containers.spec import BACKENDS

    return [get_backend(name).probe() for name in BACKENDS]


def _limits(able: Capabilities) -> str:
    limits = {
        f"memory ({able.memory})": able.memory != "none",
        f"processes ({able.pids})": able.pids != "none",
        "processor time": able.cpus,
        "private files": able.disk,
    }
    return ", ".join(limit for limit, there in limits.items() if there) or "none"


def _inside(able: Capabilities) -> str:
    means = {"cgroup": "frozen while idle", "signal": "stopped by signals while idle", "none": "never frozen"}
    words = (
        f"images: {', '.join(able.images)}",
        "network off unless asked for" if able.network_off else "network always on",
        f"system calls {'filtered' if able.seccomp_filter else 'not filtered'}",
        f"system directories {'writable (privately)' if able.writable_system else 'read-only'}",
        "other users" if able.multiple_users else "one user",
        "ports" if able.ports else "no ports",
        means[able.freeze],
        "forks" if able.fork else "no forks",
    )
    return "; ".join(words)


def model_servers() -> MachineCheck:
    """Find the vLLM that runs this machine's model servers."""
    from agentfly.core.errors import PrerequisiteError
    from agentfly.resources.model_server.spec import ModelServerSpec
    from agentfly.resources.model_server.vllm_command import probe_vllm

    try:
        version = probe_vllm()
    except PrerequisiteError as error:
        found, _, remedy = str(error).partition(". ")
        return MachineCheck("model servers", CheckStatus.NOTE, found, remedy)
    return MachineCheck(
        "model servers", CheckStatus.OK, f"vLLM {version}, run by {ModelServerSpec(model='any').interpreter()}"
    )


def mcp_servers() -> MachineCheck:
    """Find the official package of the Model Context Protocol."""
    try:
        version = importlib.metadata.version("mcp")
    except importlib.metadata.PackageNotFoundError:
        return MachineCheck(
            "MCP servers",
            CheckStatus.NOTE,
            "without mcp",
            f"Needed for the tools of such: {install_command('mcp')}.",
        )
    return MachineCheck("MCP servers", CheckStatus.OK, f"mcp {version}")


def model_cache() -> MachineCheck:
    """List the models of the catalog that are on this machine."""
    from agentfly.policies.catalog import list_models

    models = list_models()
    here = [model.name for model in models if model.path is not None]
    absent = [model.name for model in models if model.path is None]
    remedy = f"Downloaded on first use, or with agentfly models get {absent[0]}." if absent else ""
    return MachineCheck("models", CheckStatus.OK, f"here: {', '.join(here)}" if here else "none here", remedy)


def free_disk() -> MachineCheck:
    """Check the disk space for models."""
    from agentfly.core.errors import PrerequisiteError
    from agentfly.core.user_directories import is_accessible
    from agentfly.policies.catalog import cache_dir

    try:
        chosen = path = cache_dir()
    except PrerequisiteError as error:
        found, _, remedy = str(error).partition(": ")
        return MachineCheck("disk", CheckStatus.NOTE, found, remedy)
    while not is_accessible(path):
        path = path.parent
    free = shutil.disk_usage(path).free
    found = f"{free / _GIB:.1f} GiB free at {path}"
    if not os.access(path, os.W_OK | os.X_OK):
        return MachineCheck(
            "disk",
            CheckStatus.NOTE,
            f"{chosen} cannot be made: this user may not write to {path}",
            "Models that are fetched are kept there. Set AGENTFLY_CACHE_DIR to a directory that can be written.",
        )
    if free < _DISK_FOR_MODELS:
        return MachineCheck(
            "disk",
            CheckStatus.MISSING,
            found,
            "Fetching a model needs 2 GiB. Free some, or set AGENTFLY_CACHE_DIR to a directory with more room.",
        )
    return MachineCheck("disk", CheckStatus.OK, found)


def _print(findings: list[MachineCheck]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {
        CheckStatus.OK: Text("ok", "green"),
        CheckStatus.NOTE: Text("note", "yellow"),
        CheckStatus.MISSING: Text("missing", "red"),
    }
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", "dim")
        table.add_row(marks[finding.verdict], Text(finding.what, style="bold"), text)
    Console().print(table)
