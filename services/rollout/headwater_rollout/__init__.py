"""Rollout worker: turns one prompt into one scored group."""
