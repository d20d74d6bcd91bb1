"""What a commit claims, checked before the engine believes it: a wrong token here would fail a step of every request."""

from __future__ import annotations

import math

from shared.base.request import Request
from shared.engine.schedule.plan import SampledToken
from shared.rpc import kv_pb2, request_pb2


class WrongManifest(Exception):
    """Says what does not fit."""


def check_counts(commit: kv_pb2.Commit, request: Request, num_chunks: int, num_blocks: int) -> None:
    """`num_chunks` have come, and `num_blocks` were due. Raises WrongManifest."""
    if commit.num_chunks != num_chunks:
        raise WrongManifest(f"commit after {num_chunks} of {commit.num_chunks} chunks")
    if commit.num_blocks != num_blocks:
        raise WrongManifest(f"num_blocks is {commit.num_blocks}; {num_blocks} were due")
    if commit.num_cached_tokens > len(request.token_ids):
        raise WrongManifest(f"num_cached_tokens is {commit.num_cached_tokens}; the prompt has {len(request.token_ids)}")


def first_tokens_of(commit: kv_pb2.Commit, request: Request, vocab_size: int) -> list[SampledToken]:
    """The first token of each output. Raises WrongManifest if they are not what `request` asks for."""
    if len(commit.first_tokens) != request.sampling.n:
        raise WrongManifest(f"commit has {len(commit.first_tokens)} first tokens for n={request.sampling.n}")
    for token in commit.first_tokens:
        _check_token(token, request, vocab_size)
    return [_sampled(token) for token in commit.first_tokens]


def _check_token(token: request_pb2.Token, request: Request, vocab_size: int) -> None:
    if token.index != request.num_emitted:
        raise WrongManifest(f"a first token has index {token.index}; {request.num_emitted} is next")
    for token_id in (token.token_id, *(top.token_id for top in token.top_logprobs)):
        if token_id >= vocab_size:
            raise WrongManifest(f"token id {token_id} is outside the vocabulary of {vocab_size}")
    wanted = request.sampling.num_logprobs
    if token.HasField("logprob") != (wanted is not None) or len(token.top_logprobs) > (wanted or 0):
        raise WrongManifest(f"a first token has {len(token.top_logprobs)} logprobs; {wanted} were asked for")
    values = [top.logprob for top in token.top_logprobs] + ([token.logprob] if token.HasField("logprob") else [])
    if not all(map(math.isfinite, values)):
        raise WrongManifest("a first token's logprobs are not finite")


def _sampled(token: request_pb2.Token) -> SampledToken:
    top = tuple((t.token_id, t.logprob) for t in token.top_logprobs)
    return SampledToken(token.token_id, token.logprob if token.HasField("logprob") else None, top)
