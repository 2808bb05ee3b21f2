"""Headwater: engine."""
