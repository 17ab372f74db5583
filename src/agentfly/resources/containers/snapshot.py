"""SnapshotImage: the files of a sandbox at one moment, as the image of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable

PREFIX = "snapshot:"


class SnapshotImage(str):
    """The name of a snapshot, for a spec's ``image``. The snapshot lasts as long as this object does.

    Specs, sandboxes and pools that have it as their image hold it. A copy of its text, as in a pickle or another
    process, holds nothing.
    """

    def __new__(cls, backend: str, name: str, drop: Callable[[], object]) -> SnapshotImage:
        """Name a snapshot.

        Args:
            backend: the backend that made it and alone can use it.
            name: how the backend knows it.
            drop: called once when nothing holds it any more, or the process ends. It may be called on any thread, in
                the middle of anything, so it must do no more than note what is to be removed.
        """
        image = super().__new__(cls, f"{PREFIX}{backend}:{name}")
        weakref.finalize(image, drop)
        return image

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def snapshot_name(image: str, backend: str) -> str | None:
    """How a backend knows the snapshot that an image is; None if it is none of that backend's."""
    prefix = f"{PREFIX}{backend}:"
    return image.removeprefix(prefix) if image.startswith(prefix) else None
