"""Live instances: what is done with them, who uses them, and when they stand still."""
