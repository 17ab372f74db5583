"""Where tokens come from. Each implementation is imported when it is asked for."""
