"""What belongs to one HTTP request from its head to its last byte. The outermost middleware makes it; endpoints read it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from services.router.http.stopping import Stopping

_KEY = "twostroke"  # in the ASGI scope
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Connection(Protocol):
    """The client's connection, as `protocol.py` has it."""

    @property
    def is_stuck(self) -> bool:
        """The client does not read what was written to it: more would have to wait."""

    def abort(self) -> None:
        """Closes it without writing what has not been written."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    request_id: str  # what X-Request-Id says
    is_id_given: bool  # by the client, so that several requests may have the same
    arrived_at: float  # time.perf_counter()
    timeout_s: float
    stopping: Stopping
    connection: Connection
    tenant: str = ""  # whose key it bears; empty: the server has no keys

    @property
    def deadline_at(self) -> float:
        return self.arrived_at + self.timeout_s

    @property
    def left_s(self) -> float:
        return self.deadline_at - time.perf_counter()

    def new_id(self, prefix: str) -> str:
        """An id of the answer, and of what workers are asked, in which the request's own can be found."""
        unique = f"-{uuid4().hex[:12]}" if self.is_id_given else ""
        return f"{prefix}-{self.request_id}{unique}"


def request_id_from(given: str) -> tuple[str, bool]:
    """The client's own id if it can stand in a header and a log line, else a new one; and whether it was the client's."""
    return (given, True) if _SANE_ID.fullmatch(given) else (uuid4().hex, False)


def begin(scope: MutableMapping[str, Any], context: RequestContext) -> None:
    scope[_KEY] = context


def context_of(scope: Mapping[str, Any]) -> RequestContext:
    context: RequestContext = scope[_KEY]
    return context
