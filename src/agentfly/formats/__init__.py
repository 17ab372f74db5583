"""Text to token ids and back: chat formats, and the formats of tool calls."""
