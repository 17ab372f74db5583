"""Benchmarks of the resource engine and of the kinds of resource."""
