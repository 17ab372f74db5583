"""Helpers for tests of users' own resources, tools and runs."""
