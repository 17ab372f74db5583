"""The number of repetitions of random tests in a test run."""

from __future__ import annotations

import os


def scaled(usual: int, long: int) -> int:
    """The number of examples or histories: `usual` in `make check` and `make test`, `long` in `make test-long`.

    Used as ``@settings(max_examples=scaled(50, 5_000))``.
    """
    return long if os.environ.get("AGENTFLY_TESTS") == "long" else usual
