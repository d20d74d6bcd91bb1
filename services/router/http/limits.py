"""Bounds on what one client may ask for, so that nobody can exhaust the router; and the reading of a body within them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from fastapi import Request

from services.router.http.errors import BodyTimeout, ContextLengthExceeded, PayloadTooLarge, UnsupportedMediaType
from shared.base.errors import InvalidRequest

MAX_FIELDS = 64  # of one object
MAX_PROMPTS = 128
MAX_CHOICES = 256  # prompts times n
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
BODY_TIMEOUT_S = 60.0
# Of an answer that is not streamed, and so is held in memory: its tokens, each counted once and once for each logprob.
MAX_RESULT_VALUES = 2**19


def check_content_type(request: Request) -> None:
    """JSON said to be JSON: a web page of another origin cannot send that without asking first. Raises UnsupportedMediaType."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType(f"the content type is {given[:100]!r}; it must be application/json")


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


def fit_result(num_choices: int, max_tokens: int, num_logprobs: int | None, is_asked: bool) -> int:
    """How many tokens each output of an answer that is not streamed may have: `max_tokens`, or fewer if the client did not ask for
    them (`is_asked`). Raises InvalidRequest if it did and they are too many."""
    num_values = num_choices * (1 if num_logprobs is None else num_logprobs + 2)  # of one token: itself, chosen and top logprobs
    if num_values * max_tokens <= MAX_RESULT_VALUES:
        return max_tokens
    if is_asked:
        raise InvalidRequest(
            f"{num_choices} outputs of {max_tokens} tokens, with their logprobs if any, are {num_values * max_tokens} values; "
            f"an answer that is not streamed may have {MAX_RESULT_VALUES}: ask for less, or set stream to true",
            param="max_tokens",
        )
    return MAX_RESULT_VALUES // num_values


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming the first id outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{param} holds token id {wrong}; token ids are between 0 and {vocab_size - 1}", param=param)
