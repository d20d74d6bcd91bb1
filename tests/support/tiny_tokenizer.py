"""A small byte-level BPE tokenizer with a chat template, saved the way a model folder holds it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Prefill is bound by compute and decode by bandwidth.",
    "Schöne Grüße aus München, naïve café, 日本語のテキスト, русский текст.",
    "one two three four five six seven eight nine ten",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2  # <|im_end|>
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if style is defined %}{{ style }}{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["<tool>", "été"])  # not special; the second looks like bytes of the alphabet
    return tokenizer


def save_tiny_tokenizer(folder: Path) -> Path:
    """Files as a model folder has them, but no weights."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab_size = tokenizer.get_vocab_size() + 8  # padded, as models do
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size, "eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, EOS_ID]}))
    return folder
