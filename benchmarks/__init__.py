"""Studies and comparisons with other frameworks. They are not part of the package."""
