"""Headwater: telemetry."""
