"""Entry point of the trainer: `torchrun -m headwater_trainer …`, or `headwater-trainer …` for a single rank."""

import sys

from headwater_trainer.config import parse_args


def main() -> None:
    """Parse the command line first: torch is imported after it."""
    config = parse_args()
    from headwater_trainer.app import run_trainer

    sys.exit(run_trainer(config))


if __name__ == "__main__":
    main()
