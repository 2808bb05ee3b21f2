"""Held-out evaluation through the running services: collect scores, intervals, comparison, pictures. No torch."""
