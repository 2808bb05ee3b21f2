"""Headwater: rpc."""
