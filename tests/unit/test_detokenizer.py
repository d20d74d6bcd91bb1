"""Text from tokens: detokenizers against `tokenizers`' own decode of the whole, stop strings against a search of the whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.router.text.choice import ChoiceText, Piece
from services.router.text.loading import ModelFacts
from services.router.text.stops import StopMatcher, StopStrings
from services.router.text.tokenizer import ChatTokenizer
from shared.base.request import FinishReason, Token
from tests.support.tiny_tokenizer import EOS_ID, tiny_tokenizer

TEXTS = [
    "plain words",
    "emoji 👩🏽‍🚀👍🏿🇩🇪 and more",
    "日本語のテキスト、русский текст, עברית, हिन्दी",
    "control \x00\x07\x7f and \u2028 and \ufffd itself",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 outside the BMP 😀",
]


def _wrap(tokenizer: Tokenizer) -> ChatTokenizer:
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ModelFacts(None, frozenset()))


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def byte_level(raw: Tokenizer) -> ChatTokenizer:
    return _wrap(raw)


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """Llama 2's kind: low blocks for spaces, byte tokens for what the vocabulary lacks, the first space is stripped."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz日語", "▁the", "▁a", "ing", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _pieces(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()
) -> list[str]:
    detokenizer = tokenizer.new_detokenizer(prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.step(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("skip_special_tokens", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_random_ids_add_up_to_the_whole_decoded(
    raw: Tokenizer, byte_level: ChatTokenizer, seed: int, skip_special_tokens: bool
) -> None:
    rng = random.Random(seed)
    size = raw.get_vocab_size() + 5  # some ids stand for nothing
    # Odd seeds: only single bytes of the upper half, so that most sequences are invalid or unfinished characters.
    high_bytes = [i for i in range(size) if (b := byte_level.vocabulary.token_bytes(i)) and len(b) == 1 and b[0] >= 0x80]
    for _ in range(50):
        token_ids = rng.choices(high_bytes if seed % 2 else range(size), k=rng.randrange(1, 40))
        assert "".join(_pieces(byte_level, token_ids, skip_special_tokens)) == raw.decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_no_piece_ends_inside_a_character(raw: Tokenizer, byte_level: ChatTokenizer, text: str) -> None:
    shown = ""
    for piece in _pieces(byte_level, raw.encode(text).ids, True):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character(raw: Tokenizer, byte_level: ChatTokenizer) -> None:
    token_ids = raw.encode("ab👍").ids[:-1]
    *steps, last = _pieces(byte_level, token_ids, True)
    assert ("".join(steps), last) == ("ab", "\ufffd")


def test_special_tokens_are_shown_only_on_request(raw: Tokenizer, byte_level: ChatTokenizer) -> None:
    token_ids = [*raw.encode("hi").ids, EOS_ID, raw.token_to_id("<tool>")]
    assert "".join(_pieces(byte_level, token_ids, True)) == "hi<tool>"
    assert "".join(_pieces(byte_level, token_ids, False)) == "hi<|im_end|><tool>"


@pytest.mark.parametrize("text", [*TEXTS, "the thing  a  日 語", "x"])
def test_a_vocabulary_that_is_not_byte_level_gives_the_whole_decoded(sentencepiece_like: Tokenizer, text: str) -> None:
    token_ids = sentencepiece_like.encode(text).ids
    assert "".join(_pieces(_wrap(sentencepiece_like), token_ids, False)) == sentencepiece_like.decode(token_ids)


def test_stray_byte_tokens_cost_one_replacement_character_each(sentencepiece_like: Tokenizer) -> None:
    ids = [sentencepiece_like.token_to_id(piece) for piece in ("a", "<0xF0>", "<0x9F>", "b", "<0xE2>")]
    assert "".join(_pieces(_wrap(sentencepiece_like), ids, False)) == sentencepiece_like.decode(ids) == "a\ufffd\ufffdb\ufffd"


# Other vocabularies, and outputs that follow a prompt


def _gemma_like(sentencepiece_like: Tokenizer) -> Tokenizer:
    """With byte fallback, and without a first space to strip."""
    tokenizer = Tokenizer.from_str(sentencepiece_like.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _unigram(sentencepiece_like: Tokenizer) -> Tokenizer:
    pieces = [*((piece, -2.0) for piece in ["<unk>", "▁", *"abcdefgh", "▁the", "ing", "\ufffd", "日"])]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def _wordpiece(sentencepiece_like: Tokenizer) -> Tokenizer:
    names = ["[UNK]", "a", "the", "##ing", "##e", ".", "!", "do", "n", "'", "日", "not"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


def _word_suffixes(sentencepiece_like: Tokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(["a", "b", "a</w>", "the</w>", "!</w>"])}, []))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


KINDS = [lambda llama: llama, _gemma_like, _unigram, _wordpiece, _word_suffixes]


def _expected(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """decode of the whole, where each run of byte tokens shows what a reader byte by byte can know."""
    text, run, shown = "", b"", [i for i in token_ids if tokenizer.id_to_token(i) is not None]
    before: list[int] = []
    for token_id in [*shown, None]:
        name = None if token_id is None else tokenizer.id_to_token(token_id)
        if name is not None and name.startswith("<0x"):
            run += bytes.fromhex(name[3:5])
        elif run:
            num_good = max(k for k in range(len(run) + 1) if _is_utf8(run[:k]))
            text += run[:num_good].decode() + "\ufffd" * (len(run) - num_good)
            run = b""
        if token_id is not None and not (name or "").startswith("<0x"):
            text += tokenizer.decode([*before, token_id])[len(tokenizer.decode(before)) :]
        if token_id is not None:
            before.append(token_id)
    return text


def _is_utf8(run: bytes) -> bool:
    try:
        return bool(run.decode() or True)
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("seed", range(3))
def test_an_output_is_the_whole_decoded_less_the_prompt(sentencepiece_like: Tokenizer, kind: int, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    raw = KINDS[kind](sentencepiece_like)
    tokenizer = _wrap(raw)
    texts = [i for i in range(raw.get_vocab_size()) if not raw.id_to_token(i).startswith("<0x")]
    for _ in range(150):
        ids = rng.choices(texts if rng.random() < 0.5 else range(raw.get_vocab_size() + 2), k=rng.randrange(1, 14))
        num_prompt = rng.randrange(len(ids) + 1)
        if num_prompt and (raw.id_to_token(ids[num_prompt - 1]) or "<0x").startswith("<0x"):
            num_prompt = 0  # where a prompt ends inside a character is another test's
        got = "".join(_pieces(tokenizer, ids[num_prompt:], False, ids[:num_prompt]))
        assert _expected(raw, ids[:num_prompt]) + got == _expected(raw, ids), (ids, num_prompt)
        if set(ids) <= set(texts):
            assert _expected(raw, ids) == raw.decode(ids, False), ids


@pytest.mark.parametrize("kind", [0, 1])
def test_text_behind_stray_bytes_is_not_swallowed(sentencepiece_like: Tokenizer, kind: int) -> None:
    raw = KINDS[kind](sentencepiece_like)
    for num_stray in (1, 3, 8, 20):
        ids = [raw.token_to_id(name) for name in ["a", *["<0x9F>"] * num_stray, "▁the", "a"]]
        pieces = _pieces(_wrap(raw), ids, False)
        assert "".join(pieces) == raw.decode(ids) == "a" + "\ufffd" * num_stray + " thea"
        assert pieces[1 : 1 + num_stray] == ["\ufffd"] * num_stray, "a byte that begins no character is shown at once"


@pytest.mark.parametrize("char", ["é", "語", "😀"])
def test_a_character_that_the_prompt_begins_is_finished_by_the_output(
    raw: Tokenizer, byte_level: ChatTokenizer, sentencepiece_like: Tokenizer, char: str
) -> None:
    fallback = [sentencepiece_like.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
    single_bytes = {byte_level.vocabulary.token_bytes(i): i for i in range(raw.get_vocab_size())}
    bytes_ids = [single_bytes[bytes([byte])] for byte in char.encode()]
    for tokenizer, ids in ((byte_level, bytes_ids), (_wrap(sentencepiece_like), fallback)):
        for cut in range(len(ids)):
            long_prompt = [*ids * 50, *ids[:cut]]  # only its end is read
            assert "".join(_pieces(tokenizer, ids[cut:], False, long_prompt)) == char


def test_ids_that_stand_for_nothing_do_not_end_a_character(sentencepiece_like: Tokenizer) -> None:
    nothing = sentencepiece_like.get_vocab_size() + 1
    first, *rest = [sentencepiece_like.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    ids = [first, nothing, *rest]
    assert "".join(_pieces(_wrap(sentencepiece_like), ids, False)) == sentencepiece_like.decode(ids) == "é"


def test_the_first_space_is_kept_behind_a_prompt_and_dropped_at_the_beginning(sentencepiece_like: Tokenizer) -> None:
    tokenizer = _wrap(sentencepiece_like)
    the = sentencepiece_like.token_to_id("▁the")
    assert "".join(_pieces(tokenizer, [the, the], False, [the])) == " the the"
    assert "".join(_pieces(tokenizer, [the, the], False)) == "the the"


# Stop strings


def _first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that a reader of single characters would notice first; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


def _cut(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_are_found_wherever_the_text_is_cut(seed: int, include_stop: bool) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) + rng.choice(["", "c"]) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choices("abc", weights=[5, 5, 1], k=rng.randrange(30)))
        matcher, shown, was_found = StopMatcher(StopStrings(stops, include_stop)), "", False
        for piece in _cut(rng, text):
            released, was_found = matcher.feed(piece)
            shown += released
            if was_found:
                break
        expected = _first_stop(text, stops)
        if expected is None:
            assert not was_found
            assert shown + matcher.flush() == text
        else:
            assert was_found
            assert shown == text[: expected[include_stop]]


@pytest.mark.parametrize("seed", range(3))
def test_no_more_is_held_back_than_could_become_a_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    stops = ["abab", "bba", "cab"]
    for _ in range(200):
        text = "".join(rng.choices("abc", k=12))
        if _first_stop(text, stops) is None:
            shown, _ = StopMatcher(StopStrings(stops)).feed(text)
            held = text[len(shown) :]
            longest = max((k for k in range(4) for stop in stops if k < len(stop) and text.endswith(stop[:k])), default=0)
            assert len(held) == longest


# Choices: tokens, text and logprobs together


def _choice(tokenizer: ChatTokenizer, stops: list[str], **options: bool | int) -> ChoiceText:
    matcher = StopMatcher(StopStrings(stops, bool(options.get("show_stop_token")))) if stops else None
    return ChoiceText(0, tokenizer.new_detokenizer((), skip_special_tokens=True), matcher, with_logprobs=True, **options)  # type: ignore[arg-type]


def _feed(choice: ChoiceText, token_ids: list[int], step: int, reason: FinishReason | None) -> list[Piece]:
    tokens = [Token(i, token_id, -0.5) for i, token_id in enumerate(token_ids)]
    pieces = []
    for i in range(0, len(tokens), step):
        is_last = i + step >= len(tokens)
        pieces.append(choice.feed(tokens[i : i + step], reason if is_last else None))
        if choice.finish_reason:
            break
    return pieces


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_what_is_shown_does_not_depend_on_how_many_tokens_come_at_once(
    raw: Tokenizer, byte_level: ChatTokenizer, step: int
) -> None:
    token_ids = raw.encode("one 👍 two three four").ids
    choice = _choice(byte_level, ["thr", "zzz"])
    pieces = _feed(choice, token_ids, step, FinishReason.LENGTH)
    shown = [one for piece in pieces for one in piece.tokens]
    assert "".join(piece.text for piece in pieces) == "one 👍 two "
    assert choice.finish_reason is FinishReason.STOP
    assert [one.token.index for one in shown] == list(range(len(shown)))
    lengths = [len(raw.decode(token_ids[: k + 1])) for k in range(len(token_ids))]
    assert choice.num_tokens == next(k + 1 for k, n in enumerate(lengths) if n >= len("one 👍 two thr"))
    assert len(shown) == choice.num_tokens, "every token that is counted is listed"


def test_logprobs_cover_all_tokens_and_offsets_point_at_their_text(raw: Tokenizer, byte_level: ChatTokenizer) -> None:
    text = "naïve 日本 fox"
    token_ids = raw.encode(text).ids
    pieces = _feed(_choice(byte_level, ["never"]), [*token_ids, EOS_ID], 1, FinishReason.STOP)
    shown = [one for piece in pieces for one in piece.tokens]
    assert [one.token.token_id for one in shown] == [*token_ids, EOS_ID]
    offsets = [len(raw.decode(token_ids[:k]).rstrip("\ufffd")) for k in range(len(token_ids) + 1)]
    assert [one.text_offset for one in shown] == offsets
    assert "".join(one.text for one in shown) == text


def test_a_token_goes_out_in_the_piece_that_releases_the_last_of_its_text(raw: Tokenizer, byte_level: ChatTokenizer) -> None:
    ids = [raw.token_to_id(name) for name in "abcd"]
    free = _feed(_choice(byte_level, []), ids, 1, None)
    assert [(piece.text, len(piece.tokens)) for piece in free] == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    held = _feed(_choice(byte_level, ["bcx"]), ids, 1, None)
    assert [(piece.text, len(piece.tokens)) for piece in held] == [("a", 1), ("", 0), ("", 0), ("bcd", 3)]
    cut_ids = [raw.token_to_id("<tool>"), raw.token_to_id("d")]  # the end of the first token is held back
    cut = _feed(_choice(byte_level, [">x"]), cut_ids, 1, None)
    assert [(piece.text, len(piece.tokens)) for piece in cut] == [("<tool", 0), (">d", 2)]
    emoji = _feed(_choice(byte_level, []), raw.encode("👍a").ids, 1, None)
    assert [(piece.text, len(piece.tokens)) for piece in emoji] == [("", 0), ("", 0), ("", 0), ("👍", 4), ("a", 1)]


def test_a_stop_token_counts_but_has_no_text_unless_asked_for(raw: Tokenizer, byte_level: ChatTokenizer) -> None:
    stop_id = raw.token_to_id("<tool>")
    ids = [*raw.encode("fox").ids, stop_id]
    hidden, shown = _choice(byte_level, []), _choice(byte_level, [], show_stop_token=True)
    assert "".join(piece.text for piece in _feed(hidden, ids, 1, FinishReason.STOP)) == "fox"
    assert "".join(piece.text for piece in _feed(shown, ids, 1, FinishReason.STOP)) == "fox<tool>"
    assert hidden.num_tokens == shown.num_tokens == len(ids)


@pytest.mark.parametrize(("stop", "shown"), [("a", "aaaa"), ("aa", "aaa"), ("aaaa", "a"), ("aaaaa", "")])
def test_a_stop_string_may_begin_before_min_tokens_but_ends_behind_them(
    raw: Tokenizer, byte_level: ChatTokenizer, stop: str, shown: str
) -> None:
    choice = _choice(byte_level, [stop], min_tokens=4)
    pieces = _feed(choice, [raw.token_to_id("a")] * 8, 1, None)
    assert "".join(piece.text for piece in pieces) == shown
    assert choice.num_tokens == 5


def test_a_stop_string_that_ended_before_min_tokens_is_not_found_again_in_text_held_back() -> None:
    matcher = StopMatcher(StopStrings(["abc", "b"]))
    assert matcher.feed("ab", may_stop=False) == ("", False)
    assert matcher.feed("x") == ("abx", False)
    assert matcher.feed("b") == ("", True)


def test_text_held_back_is_given_out_once() -> None:
    matcher = StopMatcher(StopStrings(["abc"]))
    assert (matcher.feed("ab"), matcher.flush(), matcher.flush()) == (("", False), "ab", "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="everywhere"):
        StopStrings(["a", ""])


def test_text_held_back_comes_out_at_the_end(raw: Tokenizer, byte_level: ChatTokenizer) -> None:
    pieces = _feed(_choice(byte_level, ["dog."]), raw.encode("lazy dog").ids, 1, FinishReason.LENGTH)
    assert "".join(piece.text for piece in pieces) == "lazy dog"
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_an_end_that_comes_without_tokens_counts_none(byte_level: ChatTokenizer) -> None:
    choice = _choice(byte_level, [])
    assert choice.feed((), FinishReason.STOP).finish_reason is FinishReason.STOP
    assert choice.num_tokens == 0
