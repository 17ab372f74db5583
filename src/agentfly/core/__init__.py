"""Plain values and the ground floor: errors, events, messages, tasks, tokens, trajectories, files, threads."""
