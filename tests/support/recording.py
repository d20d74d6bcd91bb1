"""What capturing a CUDA graph does, on a CPU: the operations of some work with the tensors and numbers they had, to be run again.

Whatever the work read from Python while it was recorded stays as it was, as in a real graph; only what tensors hold may change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def record(work: Callable[[], None]) -> Callable[[], None]:
    with torch.inference_mode():
        recorded = make_fx(work)()

    def replay() -> None:
        with torch.inference_mode():
            recorded()

    return replay
