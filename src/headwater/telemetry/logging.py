"""Plain one-line logs on standard error: time, level, service, message."""

import logging
import os
import sys
import time


def setup_logging(service: str, level: str | None = None) -> None:
    """Configure the root logger. `level` defaults to $HEADWATER_LOG_LEVEL, then INFO. Times are UTC."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(f"%(asctime)sZ %(levelname)s {service} %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level or os.environ.get("HEADWATER_LOG_LEVEL", "INFO"), handlers=[handler], force=True)
    for noisy in ("httpx", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
