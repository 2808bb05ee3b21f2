"""Headwater: stream."""
