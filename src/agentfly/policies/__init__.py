"""Policies: the models that generate. Each implementation is imported when it is first used."""
