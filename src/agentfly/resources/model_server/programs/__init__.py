"""Programs that a model server starts."""
