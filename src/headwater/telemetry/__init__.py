"""Logs and, later, metrics."""

from headwater.telemetry.logging import setup_logging

__all__ = ["setup_logging"]
