"""Agents: the agent, its tools, memory and rewards, which users write."""
