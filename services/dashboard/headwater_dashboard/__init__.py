"""Headwater: headwater_dashboard."""
