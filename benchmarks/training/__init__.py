"""Training throughput and memory compared with trl: ``python -m benchmarks.training``."""
