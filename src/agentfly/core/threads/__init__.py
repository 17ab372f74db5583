"""Where blocking work is done, away from the event loop."""
