"""Containers: `ContainerSpec` and `Container`, and the backends that isolate them.

Tools see `container`, `command` and `file_transfer`. Each backend is a package with a `backend` and a `sandbox`.
"""
