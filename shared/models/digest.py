"""A digest of a model's configuration and weights: what two workers compare before they exchange KV blocks. Torch-free."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from shared.models.locate import ModelFiles

_SAMPLE_BYTES = 1 << 20


def weights_digest(files: ModelFiles) -> str:
    """128-bit hex digest, the same on every machine for the same files.

    Per weight file it reads name, size, and the first and last MiB (the first holds a safetensors or GGUF header: names, types,
    shapes and offsets of all tensors). So it takes milliseconds where hashing all bytes would take minutes, and tells apart other
    models, revisions, precisions and fine-tunes of all layers; it does not see a change to tensors in the middle of a file alone,
    nor damage there.
    """
    digest = blake2b(digest_size=16, person=b"twostroke-model")
    config = files.folder / "config.json"
    if not files.gguf_file:
        _add(digest, config.name, config.read_bytes())
    for path in files.weight_files:
        _add(digest, path.name, path.stat().st_size.to_bytes(8, "little") + _sample(path))
    return digest.hexdigest()


def _add(digest: blake2b, name: str, content: bytes) -> None:
    """Length-prefixed, so that no two lists of files read the same."""
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _sample(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _SAMPLE_BYTES))
        return head + file.read()
