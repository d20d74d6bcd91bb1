"""Whole answers: their lists grow as JSON, and others have turns while they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from services.router.http.chat import ChatWriter
from services.router.http.growing_lists import GrowingLists
from services.router.http.render import Envelope, collect
from services.router.http.run import Usage
from services.router.text.choice import Piece, ShownToken
from shared.base.request import FinishReason, Token

NUM_TOKENS = 1000


class OneLogprob:
    """Writes the token's index, and nothing else."""

    def for_chat(self, shown: list[ShownToken]) -> dict[str, Any]:
        return {"content": [one.token.index for one in shown], "refusal": None}


class StubRun:
    num_choices = 2
    usage = Usage(1, 2, 0)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        tokens = [ShownToken(Token(i, 7, -1.0, ()), "x", i) for i in range(NUM_TOKENS)]
        yield Piece(1, "a", [], None)
        yield Piece(0, "b", tokens, FinishReason.LENGTH)
        yield Piece(1, "c", tokens[:1], FinishReason.STOP)


@pytest.mark.parametrize("parts", [[], [[]], [[1]], [[1, "two"], [], [{"three": 3}]], [[], [None]]])
def test_lists_that_grew_are_written_as_the_one_list(parts: list[list[Any]]) -> None:
    lists = GrowingLists({"a": [], "b": [0], "c": None})
    for part in parts:
        lists.add({"a": part, "c": None})
    expected = {"a": [item for part in parts for item in part], "b": [0], "c": None}
    assert orjson.loads(orjson.dumps(lists.whole())) == expected


async def test_a_whole_answer_has_all_of_each_choice_and_others_have_turns_while_it_is_written() -> None:
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    answer = await collect(StubRun(), ChatWriter(OneLogprob()), Envelope("id", "m"))  # type: ignore[arg-type]
    other.cancel()
    assert num_turns >= NUM_TOKENS // 100
    first, second = orjson.loads(orjson.dumps(answer))["choices"]
    assert (first["message"]["content"], first["finish_reason"]) == ("b", "length")
    assert first["logprobs"] == {"content": list(range(NUM_TOKENS)), "refusal": None}
    assert (second["message"]["content"], second["finish_reason"]) == ("ac", "stop")
    assert second["logprobs"] == {"content": [0], "refusal": None}


async def test_without_logprobs_a_whole_answer_has_none() -> None:
    answer = await collect(StubRun(), ChatWriter(None), Envelope("id", "m"))  # type: ignore[arg-type]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
