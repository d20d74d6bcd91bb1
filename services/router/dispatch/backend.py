"""The seam inside the router: HTTP on one side, workers on the other. Everything the front end asks of the fleet is here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from services.router.dispatch.model_pool import ModelPool
from shared.base.request import Output, Request


class Generation(Protocol):
    """The outputs of all choices of one request: per choice in order, every token index exactly once.

    Iterating raises TwostrokeError if the request cannot be served, again at each further step. A choice has ended with the Output
    that bears its finish reason, or by `stop_choice`; the iterator ends after the last choice has, and after `aclose`.

    Only a few outputs wait for a reader: one that is slow slows the workers' streams. The deadline ends the work of one that never
    reads.
    """

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    def stop_choice(self, choice: int) -> None:
        """Nobody will read more of this choice, as when a stop string ended it: its worker is told, its outputs no longer come, the
        others go on. Returns at once. Idempotent."""

    async def aclose(self) -> None:
        """The front end wants no more (finished, stop string found, client gone): ends both legs at once. Idempotent."""


class Backend(Protocol):
    def generate(self, request: Request, deadline_s: float) -> Generation:
        """Starts no later than at the first iteration. `deadline_s` is what is left of the request's time, in seconds."""

    def is_ready(self, model: str) -> str | None:
        """None if a request for the model (empty: for any) would succeed now, else one line that says why not."""

    def models(self) -> Mapping[str, ModelPool]:
        """By served name, the models that can be served now."""

    def max_model_len(self, model: str) -> int:
        """Longest sequence, in tokens, that every worker of the model takes; of the only model if the name is empty. Raises
        Unavailable if it has never been served."""

    async def wait_for_change(self) -> None:
        """Until `models` may have changed."""
