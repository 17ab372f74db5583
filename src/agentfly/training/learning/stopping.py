"""How learning is told to stop."""

from __future__ import annotations

import threading


class UpdateStopped(Exception):
    """Learning was told to stop, and left the weights as its last whole update had made them."""


def give_up_if(stop: threading.Event | None) -> None:
    """Raise if the event is set.

    Raises:
        UpdateStopped: it is.
    """
    if stop is not None and stop.is_set():
        raise UpdateStopped
