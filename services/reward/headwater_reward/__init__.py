"""Headwater: headwater_reward."""
