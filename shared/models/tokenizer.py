"""The tokenizer of a model as transformers has it, from a folder or out of a GGUF file. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.base.errors import ConfigError
from shared.models.gguf import read_metadata
from shared.models.locate import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PREFIX = "tokenizer.ggml."
_SPECIAL_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
                   "pad_token": "padding_token_id"}  # fmt: skip
# Names in `tokenizer.ggml.pre`, as llama.cpp gives them: text is split as GPT-2 does, these after each digit was set apart.
_GPT2_SPLITS = ("gpt-2", "mpt", "olmo", "jais")
_SINGLE_DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """On top of Rust's `tokenizers`, with its chat template or templates. Raises ConfigError, in one line, if there is none or it
    cannot be read. Takes a second or more."""
    source = files.tokenizer
    if source.is_file():
        return _from_gguf(source)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:  # the Rust side raises Exception itself for a tokenizer.json that it does not understand
        raise ConfigError(f"cannot load the tokenizer in {source}: {_first_line(error)}") from None
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer in {source} has no tokenizer.json and cannot be converted to one")
    loaded: PreTrainedTokenizerFast = tokenizer
    return loaded


def _from_gguf(path: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    metadata = read_metadata(path)
    fields = {name.removeprefix(_PREFIX): value for name, value in metadata.items() if name.startswith(_PREFIX)}
    if "tokens" not in fields or "model" not in fields:
        raise ConfigError(f"{path} holds no tokenizer; name one with --tokenizer")
    try:
        # Its words for two of the fields are its own.
        named = fields | {"tokenizer_type": fields["model"], "pre_tokenizer_type": fields.get("pre")}
        backend, _ = convert_gguf_tokenizer(str(metadata.get("general.architecture")), named)
        _set_split(backend, fields, path)
        options = {name: fields["tokens"][fields[key]] for name, key in _SPECIAL_TOKENS.items() if key in fields}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"cannot load the tokenizer in {path}, name one with --tokenizer: {_first_line(error)}") from None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=fields.get("add_bos_token", fields["model"] == "llama"),
        add_eos_token=fields.get("add_eos_token", False),
        chat_template=_chat_template(metadata),
        clean_up_tokenization_spaces=False,
        **options,
    )


def _set_split(backend: Any, fields: Mapping[str, Any], path: Path) -> None:
    """What transformers' conversion leaves out: where text is cut before merging. A wrong cut gives other tokens than the model
    was trained with, so one that is not known is refused."""
    from tokenizers import decoders, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = fields.get("pre")
    if fields["model"] == "llama" and not fields.get("add_space_prefix", True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    if fields["model"] != "gpt2" or split is None or split in GGUF_PRE_TOKENIZER_SPLITS or split in _GPT2_SPLITS:
        return
    if split not in _SINGLE_DIGIT_SPLITS:
        raise ConfigError(f"{path} has a tokenizer of unknown kind ({_PREFIX}pre is {split!r}); name one with --tokenizer")
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default: str | None = metadata.get("tokenizer.chat_template")
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in metadata.get("tokenizer.chat_templates", ())}
    templates = {name: template for name, template in named.items() if template}
    if not templates:
        return default
    return templates | ({"default": default} if default else {})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
