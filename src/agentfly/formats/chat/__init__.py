"""Chat formats: messages as token ids, and what is rendered after a generation."""
