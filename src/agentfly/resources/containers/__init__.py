"""Sandboxes.

What tools see is in container, result and files. A way of isolating is a folder with a backend and a sandbox.
"""
