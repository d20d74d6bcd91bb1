"""A model's configuration as it was read at an earlier start.

Reading one imports transformers, which takes a worker longer than all else but importing torch. What comes of it depends on nothing
but config.json, the version of transformers and the code here. An entry's name is a hash of all three, so no entry is ever out of
date, and one that cannot be read or written counts for nothing.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shared.base.cache_dir import cache_dir
from shared.models.config import ModelConfig, read_config
from shared.models.locate import ModelFiles

_CODE = ("config.py", "config_fields.py", "rope.py")  # what makes a ModelConfig of config.json


def cached_config(files: ModelFiles) -> ModelConfig:
    """As `read_config`, which is asked for what is not known, and always about GGUF files."""
    if files.gguf_file:
        return read_config(files)
    path = cache_dir() / "configs" / f"{_key(files)}.json"
    known = _load(path)
    if known is None:
        known = read_config(files)
        _save(path, known)
    return known


def _key(files: ModelFiles) -> str:
    parts = [json.dumps(dict(files.config), sort_keys=True).encode(), version("transformers").encode()]
    parts += [(Path(__file__).parent / name).read_bytes() for name in _CODE]
    return blake2b(b"".join(blake2b(part).digest() for part in parts), digest_size=16).hexdigest()


def _load(path: Path) -> ModelConfig | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
        return ModelConfig(**fields)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _save(path: Path, config: ModelConfig) -> None:
    """Whole or not at all, whoever else writes it at the same time."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(asdict(config)))
        unfinished.replace(path)
