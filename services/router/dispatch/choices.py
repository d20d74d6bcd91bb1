"""One of the n outputs of a request: the tokens it has so far, and whether it goes on."""

from __future__ import annotations

from dataclasses import replace

from shared.base.errors import Internal
from shared.base.request import Output, Request


class Choice:
    def __init__(self, request: Request, index: int) -> None:
        self.index = index
        self.token_ids = list(request.token_ids)
        self.is_stopped = False  # nobody reads more of it
        self._num_prompt_tokens = request.num_prompt_tokens
        self._num_given = len(request.token_ids)
        self._is_finished = False

    @property
    def has_ended(self) -> bool:
        return self._is_finished or self.is_stopped

    @property
    def has_tokens(self) -> bool:
        """Output tokens that no other choice of the request has."""
        return len(self.token_ids) > self._num_given

    def stop(self) -> None:
        self.is_stopped = True

    def accept(self, output: Output) -> Output | None:
        """The part of `output` that is new, or None. Raises Internal if tokens are missing before it."""
        if self.has_ended:
            return None
        next_index = len(self.token_ids) - self._num_prompt_tokens
        tokens = tuple(t for t in output.tokens if t.index >= next_index)
        if tokens and tokens[0].index != next_index:
            raise Internal(f"token {tokens[0].index} came when {next_index} was due")
        if not tokens and output.finish_reason is None:
            return None
        self.token_ids.extend(t.token_id for t in tokens)
        self._is_finished = output.finish_reason is not None
        return replace(output, choice=self.index, tokens=tokens)
