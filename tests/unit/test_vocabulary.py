"""Token ids that a model does not have are refused before they reach its embedding, whatever way they took."""

from __future__ import annotations

from typing import Any

import pytest

from shared.base.errors import InvalidRequest
from shared.base.request import Request, SamplingParams

VOCAB_SIZE = 40


def request(token_ids: tuple[int, ...] = (0, VOCAB_SIZE - 1), num_prompt_tokens: int = 1, **sampling: Any) -> Request:
    return Request("r", token_ids, num_prompt_tokens, SamplingParams(**sampling))


def test_every_id_of_the_vocabulary_is_taken():
    request(
        tuple(range(VOCAB_SIZE)), stop_token_ids=(0, VOCAB_SIZE - 1), logit_bias={0: 1.0, VOCAB_SIZE - 1: 1.0}
    ).check_vocabulary(VOCAB_SIZE)


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, 2**31, -1])
@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("prompt", lambda wrong: request((1, wrong, 2), 3)),
        ("prompt", lambda wrong: request((wrong,))),
        ("prompt", lambda wrong: request((1, 2, wrong), 1)),  # output of another worker
        ("stop_token_ids", lambda wrong: request(stop_token_ids=(3, wrong))),
        ("ignored_eos_token_ids", lambda wrong: request(ignored_eos_token_ids=(wrong,))),
        ("logit_bias", lambda wrong: request(logit_bias={3: 1.0, wrong: 1.0})),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_by_the_fields_name_wherever_it_stands(field, asked, wrong):
    with pytest.raises(InvalidRequest, match=f"^{field} has token id {wrong}; the model's are between 0 and 39$") as caught:
        asked(wrong).check_vocabulary(VOCAB_SIZE)
    assert caught.value.param == field
