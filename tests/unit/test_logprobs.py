"""Logprobs in the shapes of the two APIs: token strings add up to the text, and the chosen token is always listed."""

from __future__ import annotations

import math

import pytest
from tokenizers import Tokenizer, decoders, models

from services.router.text.choice import ChoiceText, ShownToken
from services.router.text.detokenizer import new_detokenizer
from services.router.text.logprobs import LOWEST_LOGPROB, LogprobWriter
from services.router.text.vocabulary import Vocabulary
from shared.base.request import FinishReason, Token
from tests.support.tiny_tokenizer import EOS_ID, tiny_tokenizer


@pytest.fixture(scope="module")
def byte_level() -> Vocabulary:
    return Vocabulary(tiny_tokenizer())


@pytest.fixture(scope="module")
def llama_like() -> Vocabulary:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁the", "▁a"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return Vocabulary(tokenizer)


def _wordpiece() -> Vocabulary:
    names = ["[UNK]", "a", "the", "##ing", "."]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return Vocabulary(tokenizer)


def _shown(
    vocabulary: Vocabulary, token_ids: list[int], reason: FinishReason, prompt: tuple[int, ...] = ()
) -> tuple[str, list[ShownToken]]:
    choice = ChoiceText(0, new_detokenizer(vocabulary, prompt, skip_special_tokens=True), None, with_logprobs=True)
    piece = choice.feed([Token(i, token_id, -float(i)) for i, token_id in enumerate(token_ids)], reason)
    return piece.text, list(piece.tokens)


def _one(token_id: int, logprob: float, top: tuple[tuple[int, float], ...], text: str) -> ShownToken:
    return ShownToken(Token(0, token_id, logprob, top), text, 0)


@pytest.mark.parametrize("prompt", [(), ("▁the",)])
def test_token_strings_of_pieces_add_up_to_the_text(llama_like: Vocabulary, prompt: tuple[str, ...]) -> None:
    ids_of = {llama_like.name(i): i for i in range(261)}
    output = [ids_of[name] for name in ("▁the", "a", "<0x0A>", "▁a", "▁", "▁the")]
    text, shown = _shown(llama_like, output, FinishReason.LENGTH, tuple(ids_of[name] for name in prompt))
    assert text == (" " if prompt else "") + "thea\n a  the"
    writer = LogprobWriter(llama_like)
    listed = writer.for_completion(shown)
    assert "".join(listed["tokens"]) == text
    assert listed["text_offset"] == [len("".join(listed["tokens"][:i])) for i in range(len(output))]
    assert bytes(byte for entry in writer.for_chat(shown)["content"] for byte in entry["bytes"]).decode() == text


def test_token_strings_of_words_have_the_space_that_joins_them() -> None:
    vocabulary = _wordpiece()
    text, shown = _shown(vocabulary, [2, 3, 1, 4], FinishReason.LENGTH)
    assert text == "theing a."
    assert LogprobWriter(vocabulary).for_completion(shown)["tokens"] == ["the", "ing", " a", "."]


def test_parts_of_a_character_are_told_apart_and_their_bytes_add_up(byte_level: Vocabulary) -> None:
    ids = tiny_tokenizer().encode("a😀").ids
    _, shown = _shown(byte_level, [*ids, EOS_ID], FinishReason.STOP)
    content = LogprobWriter(byte_level).for_chat(shown)["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a😀"
    assert [entry["token"] for entry in content][:2] == ["a", "bytes:\\xf0"]
    assert (content[-1]["token"], content[-1]["bytes"]) == ("<|im_end|>", [])


def test_the_chosen_token_is_among_those_of_a_chat_once_and_in_its_place(byte_level: Vocabulary) -> None:
    [a, b, c] = tiny_tokenizer().encode("abc").ids
    writer = LogprobWriter(byte_level)

    def top(token_id: int, logprob: float) -> list[tuple[str, float]]:
        shown = _one(token_id, logprob, ((a, -0.5), (b, -1.0)), byte_level.token_bytes(token_id).decode())
        [entry] = writer.for_chat([shown])["content"]
        return [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]

    assert top(a, -0.5) == [("a", -0.5), ("b", -1.0)]
    assert top(b, -1.0) == [("a", -0.5), ("b", -1.0)]
    assert top(c, -7.0) == [("a", -0.5), ("b", -1.0), ("c", -7.0)]


def test_a_chat_that_asks_for_no_top_logprobs_gets_none(byte_level: Vocabulary) -> None:
    [entry] = LogprobWriter(byte_level).for_chat([_one(10, -1.0, (), "x")])["content"]
    assert entry["top_logprobs"] == []


def test_the_chosen_token_is_among_those_of_a_completion_with_its_own_logprob(byte_level: Vocabulary) -> None:
    [a, b, c] = tiny_tokenizer().encode("abc").ids
    writer = LogprobWriter(byte_level)
    assert writer.for_completion([_one(c, -7.0, ((a, -0.5), (b, -1.0)), "c")])["top_logprobs"] == [
        {"a": -0.5, "b": -1.0, "c": -7.0}
    ]
    assert writer.for_completion([_one(c, -7.0, (), "c")])["top_logprobs"] == [{"c": -7.0}]


def test_minus_infinity_is_written_as_a_number(byte_level: Vocabulary) -> None:
    assert LogprobWriter(byte_level).for_completion([_one(10, -math.inf, (), "x")])["token_logprobs"] == [LOWEST_LOGPROB]


def test_of_two_tokens_with_the_same_text_the_chosen_one_counts(llama_like: Vocabulary) -> None:
    ids_of = {llama_like.name(i): i for i in range(261)}
    shown = _one(ids_of["a"], -0.5, ((ids_of["a"], -0.5), (ids_of["<0x61>"], -2.0)), "a")
    assert LogprobWriter(llama_like).for_completion([shown])["top_logprobs"] == [{"a": -0.5}]
