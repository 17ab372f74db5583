"""Layer II: the agent loop, and the concurrent runner."""
