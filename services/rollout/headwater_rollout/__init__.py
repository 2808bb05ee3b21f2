"""Headwater: headwater_rollout."""
