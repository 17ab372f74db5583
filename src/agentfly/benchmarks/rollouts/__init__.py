"""How close rollouts come to the best possible time, on work whose length is known exactly."""
