"""Bounds on what one client may ask for, so that nobody can exhaust the router; and the reading of a body within them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from fastapi import Request

from services.router.http.errors import BodyTimeout, ContextLengthExceeded, PayloadTooLarge
from shared.base.errors import InvalidRequest

MAX_FIELDS = 64  # of one object
MAX_PROMPTS = 128
MAX_CHOICES = 256  # prompts times n
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
BODY_TIMEOUT_S = 60.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises PayloadTooLarge as soon as more than `max_bytes` are announced or have come, BodyTimeout for a slow client."""
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is too large; at most {max_bytes} bytes are allowed")


def fit_max_tokens(num_prompt_tokens: int, asked: int | None, default: int | None, max_model_len: int, param: str) -> int:
    """How many tokens the output may have: what was asked for, else `default` (None: all there is room for) as far as it fits.

    Raises ContextLengthExceeded, naming prompt and output, if they do not fit together.
    """
    room = max_model_len - num_prompt_tokens
    if asked is not None and asked > room:
        total = num_prompt_tokens + asked
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {asked}, {total} together; "
            f"this model's context holds {max_model_len}",
            param=param,
        )
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; this model's context holds {max_model_len}, prompt and output together",
            param=param,
        )
    if asked is not None:
        return asked
    return room if default is None else min(default, room)


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming the first id outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{param} holds token id {wrong}; token ids are between 0 and {vocab_size - 1}", param=param)
