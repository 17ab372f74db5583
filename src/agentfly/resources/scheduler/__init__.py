"""The scheduler: a pure state machine without I/O, clock or concurrency."""
