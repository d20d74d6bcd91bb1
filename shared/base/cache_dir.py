"""Where this project keeps what it can make again: the default model, compiled kernels, logs of `twostroke up`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$TWOSTROKE_CACHE, else twostroke/ in $XDG_CACHE_HOME, else in ~/.cache. Not created here."""
    if own := os.environ.get("TWOSTROKE_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "twostroke"
    return Path.home() / ".cache" / "twostroke"
