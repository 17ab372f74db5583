"""MLflowTracker: a server of MLflow, or its local database."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from agentfly.training.trackers.tracker import TrackedRun, require_package

_UNTAKEN = re.compile(r"[^\w\-. :/]")  # what MLflow takes no name of a metric with
_METRICS_AT_ONCE = 1000
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 500  # characters; servers from 2.8 on take 6000


class MLflowTracker:
    """Keeps metrics with MLflow, where MLFLOW_TRACKING_URI says; by default in ``mlflow.db`` in the directory at hand.

    The run's project is the experiment, unless MLFLOW_EXPERIMENT_NAME names one.
    """

    def __init__(self) -> None:
        require_package("mlflow", "mlflow")
        self._client: Any = None
        self._id = ""

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if run.id:
            self._id = run.id
            self._client.update_run(run.id, status="RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        params = (Param(name, str(value)[:_LONGEST_PARAM]) for name, value in _flat(run.config))
        while some := list(islice(params, _PARAMS_AT_ONCE)):
            self._client.log_batch(self._id, params=some)
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """See `Tracker.log`. MLflow keeps numbers alone, and so no histogram."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = (Metric(_UNTAKEN.sub("_", name), value, now, step) for name, value in metrics.items())
        while some := list(islice(points, _METRICS_AT_ONCE)):
            self._client.log_batch(self._id, metrics=some)

    def finish(self) -> None:
        """See `Tracker.finish`."""
        self._client.set_terminated(self._id)


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
