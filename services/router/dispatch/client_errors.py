"""What a client is told of a failure inside: its kind, and no name or address of a worker. The log
has those."""

from __future__ import annotations

from shared.base.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    IncompatiblePeer,
    Internal,
    Overloaded,
    StaleTransfer,
    TwostrokeError,
    Unavailable,
)

_NO_HANDOFF = "the workers could not hand the prompt over; try again"
_TEXTS: dict[type[TwostrokeError], str] = {
    Overloaded: "the workers have no room for this request now; try again",
    DeadlineExceeded: "a worker took too long over this request",
    IncompatiblePeer: _NO_HANDOFF,
    StaleTransfer: _NO_HANDOFF,
    CorruptTransfer: _NO_HANDOFF,
    Internal: "a worker failed on this request",
}


def shown_to_client(error: TwostrokeError) -> TwostrokeError:
    """Of the same kind, if that is one which concerns a client."""
    text = _TEXTS.get(type(error))
    return Unavailable("no worker could serve this request; try again") if text is None else type(error)(text)
