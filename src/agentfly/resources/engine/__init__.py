"""The resource engine: the asynchronous shell around the scheduler."""
