"""Memory: what an agent recalls of its conversation when it speaks next."""
