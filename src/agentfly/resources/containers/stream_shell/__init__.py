"""The shell of sandboxes that are reached only by input and output streams.

``shell.py``, ``channels.py`` and ``protocol.py`` run on the host. The scripts run inside, and ``server.sh`` starts the
others.
"""
