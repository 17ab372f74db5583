"""Containers of dockerd and podman.

From the outside in: backend, configuration, sandbox. The shell in them is that of stream_shell.
"""
