"""Headwater: headwater_router."""
