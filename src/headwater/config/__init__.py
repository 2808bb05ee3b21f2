"""Recipes: what a training run is, as checked TOML."""
