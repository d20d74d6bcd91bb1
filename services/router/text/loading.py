"""From what `--model` names to a tokenizer, its chat template and what the model's configuration says. May run beside the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.router.text.sampling_defaults import SamplingDefaults
from shared.base.errors import ConfigError
from shared.models.locate import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json and generation_config.json say that the tokenizer does not."""

    vocab_size: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @classmethod
    def of(cls, files: ModelFiles, *, with_sampling_defaults: bool = True) -> ModelFacts:
        """Raises ConfigError for values that cannot be."""
        config = files.config.get("text_config") or files.config  # of a multimodal model, the part that speaks
        vocab_size = config.get("vocab_size")
        if vocab_size is not None and (type(vocab_size) is not int or vocab_size < 1):
            raise ConfigError(f"{files.folder}: vocab_size is {vocab_size!r}; it must be a positive integer")
        generation = files.generation_config if with_sampling_defaults else {}
        return cls(vocab_size, _eos_token_ids(files, config), SamplingDefaults.read(generation, files.folder))


def _eos_token_ids(files: ModelFiles, config: Mapping[str, Any]) -> frozenset[int]:
    said = files.generation_config.get("eos_token_id")
    eos = config.get("eos_token_id") if said is None else said
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token_id) is int for token_id in eos_ids):
        raise ConfigError(f"{files.folder}: eos_token_id is {eos!r}; it must be a token id or a list of them")
    return frozenset(eos_ids)


def read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read --chat-template {path}: {reason}") from None
