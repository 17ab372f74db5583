"""Programs that engines run in environments of their own, where nothing of this package is."""
