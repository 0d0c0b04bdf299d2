"""A small reinforcement-learning loop that refits its rollout weights through `jreshard.transfer` at every step."""
