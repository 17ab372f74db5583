"""Evaluation: scores and intervals, comparison, token audit, preflight checks, rescoring."""
