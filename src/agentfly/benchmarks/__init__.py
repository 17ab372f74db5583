"""The measurements of `agentfly bench`."""
