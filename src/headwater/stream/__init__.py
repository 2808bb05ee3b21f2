"""The Redis stream of scored groups between rollout workers and trainer."""
