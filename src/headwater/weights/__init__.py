"""Headwater: weights."""
