"""Sandboxes without namespaces.

They are bubblewrap's, with another launcher (backend) and another confinement (confine).
"""
