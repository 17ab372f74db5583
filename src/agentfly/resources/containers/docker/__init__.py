"""Containers of dockerd and podman.

Read ``backend.py``, ``container_config.py`` and ``sandbox.py`` in this order. Their shell is in ``stream_shell``.
"""
