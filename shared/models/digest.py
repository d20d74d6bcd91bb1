"""A digest of a model's configuration and weights: what two workers compare before they exchange KV blocks. Torch-free.

    each tensor ──> xxh3-128 of its bytes ──> name, type, shape and hash of all, by name ──┐
    config.json, less where and by what it was saved ──────────────────────────────────────┴──> BLAKE2b-128

Every byte of every tensor counts, names and places of files do not: a copy, a renamed folder, and the same tensors in one file or
in shards have one digest; a fine-tune of a single tensor has another. A GGUF file counts as one tensor. The hash is no defence
against somebody who forges weights, and need not be: whoever chooses the weights also chooses the answers.

Hashing runs at the speed of memory, or of the disk for files that nobody has read yet. Its result is kept in the cache folder, and
holds as long as size, times and inode of all files are what they were. A file changed so lately that its times could hide a
second change is not kept.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import xxhash

from shared.base.cache_dir import cache_dir
from shared.base.errors import ConfigError
from shared.models.locate import ModelFiles

_PERSON = b"twostroke-model2"  # another one voids all digests kept so far
_NOT_COUNTED = ("_name_or_path", "transformers_version")
_SETTLED_NS = 2_000_000_000  # coarsest clock of a file system
_DIGEST_HEX_CHARS = 32


def weights_digest(files: ModelFiles, clock_ns: Callable[[], int] = time.time_ns) -> str:
    """128-bit hex digest, the same on every machine for the same model. Raises ConfigError if a file cannot be read."""
    digest = blake2b(digest_size=16, person=_PERSON)
    config = {} if files.gguf_file else {name: value for name, value in files.config.items() if name not in _NOT_COUNTED}
    for part in (json.dumps(config, sort_keys=True), _tensors_digest(files, clock_ns)):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def _tensors_digest(files: ModelFiles, clock_ns: Callable[[], int]) -> str:
    try:
        before = _identities(files)
        path = _cache_path(files)
        if kept := _read_kept(path, before):
            return kept
        digest = _hash_tensors(files)
        if before == _identities(files) and _are_settled(files, clock_ns()):
            _keep(path, before, digest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the weights of {files.folder} cannot be hashed: {error}") from None
    return digest


def _hash_tensors(files: ModelFiles) -> str:
    hashes = sorted(entry for path in files.weight_files for entry in _tensors(path, is_gguf=bool(files.gguf_file)))
    return blake2b(json.dumps(hashes).encode(), digest_size=16, person=_PERSON).hexdigest()


def _tensors(path: Path, is_gguf: bool) -> Iterator[tuple[str, str, list[int], str]]:
    """(name, type, shape, hash of its bytes) of each."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        if is_gguf:
            yield "", "gguf", [len(data)], xxhash.xxh3_128_hexdigest(data)
            return
        start = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(bytes(data[8:start]))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            first, end = tensor["data_offsets"]
            if not 0 <= first <= end <= len(data) - start:
                raise ValueError(f"{path.name} is cut short: {name} ends at {end}")
            with data[start + first : start + end] as piece:
                yield name, tensor["dtype"], tensor["shape"], xxhash.xxh3_128_hexdigest(piece)


# What is kept


def _identities(files: ModelFiles) -> list[list[Any]]:
    """What changes when a file's bytes do. ctime, unlike mtime, cannot be set."""
    stats = [(path, path.stat()) for path in files.weight_files]
    return [[str(path), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for path, s in stats]


def _are_settled(files: ModelFiles, now_ns: int) -> bool:
    return all(path.stat().st_ctime_ns < now_ns - _SETTLED_NS for path in files.weight_files)


def _cache_path(files: ModelFiles) -> Path:
    names = json.dumps([str(path) for path in files.weight_files])
    return cache_dir() / "digests" / f"{blake2b(names.encode(), digest_size=16, person=_PERSON).hexdigest()}.json"


def _read_kept(path: Path, identities: list[list[Any]]) -> str | None:
    """None for what is not there, cannot be read or is about other files than these."""
    try:
        kept = json.loads(path.read_bytes())
        digest = kept["digest"]
        is_valid = kept["files"] == identities and isinstance(digest, str) and len(digest) == _DIGEST_HEX_CHARS
        return digest if is_valid else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, identities: list[list[Any]], digest: str) -> None:
    """All at once or not at all, since other workers start at the same time. A cache that cannot be written is done without."""
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps({"files": identities, "digest": digest}))
        scratch.replace(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
