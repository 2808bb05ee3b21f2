"""Headwater: cli."""
