"""Layer III: what a tool or reward may ask for by a parameter."""
