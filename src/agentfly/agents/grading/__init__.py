"""Graders: they decide whether an agent's work is right."""
