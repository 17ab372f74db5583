"""Chat formats: how messages are rendered as token ids, and what is rendered after a generation."""
