"""Studies: comparisons of training runs that differ in one setting, with several seeds."""
