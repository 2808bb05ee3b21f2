"""What only rank 0 of a run has."""

import logging
from dataclasses import dataclass

from headwater_trainer.background import BackgroundLoop
from headwater_trainer.runs import RunRecord

log = logging.getLogger(__name__)


@dataclass
class Frontend:
    """The record that clients see, and the background loop."""

    record: RunRecord
    background: BackgroundLoop

    def notice(self, reason: str, message: str) -> None:
        """Tell a person something: in the log, and to those who watch the run."""
        log.warning("%s: %s", reason, message)
        self.record.notice(reason, message)
