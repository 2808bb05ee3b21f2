"""Runs the services of one machine as child processes, and leaves none behind."""
