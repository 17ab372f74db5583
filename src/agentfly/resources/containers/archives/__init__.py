"""Hostile archives: reading, confining and unpacking them in bounded work."""
