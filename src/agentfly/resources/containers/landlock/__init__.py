"""Sandboxes without namespaces.

They are the sandboxes of bubblewrap with another launcher (``backend.py``) and another confinement (``confine.py``).
"""
