"""Studies: training runs that differ in one thing, under several seeds, laid beside one another."""
