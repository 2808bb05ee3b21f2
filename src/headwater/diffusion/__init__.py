"""The mathematics that trainer, engines and parity check share. Importing it imports torch."""

from headwater.diffusion import torchvision_ops

torchvision_ops.declare_missing()  # before anything imports diffusers or transformers
