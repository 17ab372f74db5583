"""Sandboxes of bubblewrap.

Read ``backend.py`` and ``sandbox.py`` first. ``launcher.py`` and ``process.py`` start sandboxes; ``shell.py`` and
``shell_io.py`` run commands in them.
"""
