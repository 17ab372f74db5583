"""Layer I: what a user writes."""
