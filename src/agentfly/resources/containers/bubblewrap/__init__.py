"""Sandboxes of bubblewrap.

From the outside in: backend, sandbox; then process and launcher, which start them, and shell and shell_io.
"""
