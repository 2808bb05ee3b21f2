"""Headwater: diffusion."""
