"""What only rank 0 of a run has."""

from dataclasses import dataclass

from headwater_trainer.background import BackgroundLoop
from headwater_trainer.runs import RunRecord


@dataclass
class Frontend:
    """The record that clients see, and the background loop."""

    record: RunRecord
    background: BackgroundLoop
