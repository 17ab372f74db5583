"""Fixtures of training tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small models compute on one thread: where another process has the other core, two wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def verl_algorithms() -> ModuleType:
    """verl's own advantages and losses, `verl.trainer.ppo.core_algos`, to compare with. Its import takes seconds."""
    oracles = Path(sys.prefix) / "oracles"
    if not (oracles / "verl").is_dir():
        pytest.skip("verl is not installed to compare with: run `make oracles`.")
    if str(oracles) not in sys.path:
        sys.path.append(str(oracles))
    return importlib.import_module("verl.trainer.ppo.core_algos")
