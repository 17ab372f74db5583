"""Studies and comparisons with other frameworks: what the project measures for itself, not part of the package."""
