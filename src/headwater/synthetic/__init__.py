"""Drawn pictures with captions that a program can verify: coloured shapes, counts, positions, short words.

`sample(seed, index, split)` is the whole data set: a pure function, fast enough to be a training source. No torch.
"""

from headwater.synthetic.captions import caption, parse
from headwater.synthetic.drawing import draw
from headwater.synthetic.generate import Sample, sample
from headwater.synthetic.scene import Placed, Requirements, Scene, Wanted

__all__ = ["Placed", "Requirements", "Sample", "Scene", "Wanted", "caption", "draw", "parse", "sample"]
