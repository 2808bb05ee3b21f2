"""Headwater: families."""
