"""Headwater: sglang."""
