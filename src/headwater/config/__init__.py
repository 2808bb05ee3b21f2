"""Headwater: config."""
