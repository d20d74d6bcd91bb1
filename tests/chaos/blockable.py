"""A real worker whose event loop stands still on demand: `twostroke prefill` or `decode` with a handler for SIGUSR1.

The file named by CHAOS_BLOCK_FILE holds the number of seconds. Python runs the handler on the main thread, which is the loop's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from services.cli import main

BLOCK_FILE_VARIABLE = "CHAOS_BLOCK_FILE"


def install() -> None:
    signal.signal(signal.SIGUSR1, _block)


def _block(number: int, frame: object) -> None:
    time.sleep(float(Path(os.environ[BLOCK_FILE_VARIABLE]).read_text()))


if __name__ == "__main__":
    install()
    main(sys.argv[1:])
