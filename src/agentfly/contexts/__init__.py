"""Layer III: the context that tools and rewards receive as a parameter."""
