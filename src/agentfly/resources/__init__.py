"""Layer IV: typed resources, scheduled by one engine."""
