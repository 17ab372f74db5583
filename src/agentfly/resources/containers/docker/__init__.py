"""Containers of dockerd and podman.

From the outside in: backend, container_config, sandbox. Their shell is that of stream_shell.
"""
