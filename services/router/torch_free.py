"""Keeps torch out of the router's process.

The router computes nothing, but transformers, which gives it tokenizer and chat template, imports torch wherever it is
installed: seconds of start-up and hundreds of megabytes. Python has a documented way to say no.
"""

from __future__ import annotations

import sys


def forbid_torch() -> None:
    """From here on `import torch` raises ImportError in this process. Call it first thing in the router's `__main__`."""
    sys.modules["torch"] = None  # type: ignore[assignment]
