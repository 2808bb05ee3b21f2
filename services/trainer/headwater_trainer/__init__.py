"""Headwater: headwater_trainer."""
