"""Graders: what decides whether an agent's work is right."""
