"""Model APIs as resources: clients with rate limits that processes share, and judges."""
