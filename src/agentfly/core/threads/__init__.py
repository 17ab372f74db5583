"""Threads for blocking work, away from the event loop."""
