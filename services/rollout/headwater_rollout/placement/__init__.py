"""Rollout workers over the machines of a Ray cluster: one actor for each, which is restarted where there is room."""
