"""What ``python -m benchmarks.training`` measures."""
