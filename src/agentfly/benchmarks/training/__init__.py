"""What ``agentfly bench training`` measures."""
