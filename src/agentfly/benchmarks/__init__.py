"""What `agentfly bench` measures."""
