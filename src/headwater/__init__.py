"""Headwater: reinforcement-learning post-training of image and video diffusion models.

Importing this package never imports torch; only `headwater.diffusion` and `headwater.weights` do.
"""

__version__ = "0.1.0"
