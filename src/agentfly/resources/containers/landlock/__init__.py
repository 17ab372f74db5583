"""Sandboxes without namespaces.

They are those of bubblewrap, but for what starts them (launcher) and what confines them (confine).
"""
