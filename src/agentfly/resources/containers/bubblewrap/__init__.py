"""Sandboxes of bubblewrap.

From the outside in: backend, sandbox, life; then bubble and launcher, which start them, and shell and exchange.
"""
