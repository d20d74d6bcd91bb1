"""What a GGUF file says about itself: its metadata, and single tensors of a few numbers. Torch-free.

Versions 2 and 3 of the format, little-endian: magic, version, counts; key, type and value of each field; name, shape, type and
offset of each tensor; the tensors' data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from shared.base.errors import ConfigError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type number -> format of `struct`
_FLOAT32 = 0  # of the types of tensors
_ALIGNMENT = 32
_EOS_FIELDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_metadata(path: Path) -> dict[str, Any]:
    """All fields by their names. Raises ConfigError if this is not a whole GGUF header."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).fields()
    except (OSError, ValueError, KeyError, struct.error) as error:  # of Unicode too
        raise ConfigError(f"{path} cannot be read as a GGUF file: {error or 'it is cut short'}") from None


def read_floats(path: Path, name: str) -> tuple[float, ...] | None:
    """A tensor of float32 by its name; None if the file has none of this name. Raises ConfigError as above, and for other types."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).floats(name)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"{name} of {path} cannot be read: {error}") from None


def config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a router asks of config.json, in its words."""
    eos_ids = [metadata[name] for name in _EOS_FIELDS if name in metadata]
    return {
        "model_type": metadata.get("general.architecture", ""),
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())) or None,
        "eos_token_id": list(dict.fromkeys(eos_ids)),
    }


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def fields(self) -> dict[str, Any]:
        num_fields, _ = self._counts()
        return self._fields(num_fields)

    def floats(self, name: str) -> tuple[float, ...] | None:
        num_fields, num_tensors = self._counts()
        fields = self._fields(num_fields)
        tensors = {self._string(): self._tensor() for _ in range(num_tensors)}
        if name not in tensors:
            return None
        shape, kind, offset = tensors[name]
        if kind != _FLOAT32:
            raise ValueError(f"its type is number {kind}, not float32")
        alignment = int(fields.get("general.alignment", _ALIGNMENT))
        self._position += -self._position % alignment + offset
        return self._unpack(f"{prod(shape)}f")

    def _counts(self) -> tuple[int, int]:
        """(number of fields, number of tensors)"""
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_fields = self._unpack("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; {' and '.join(map(str, _VERSIONS))} can be read")
        return num_fields, num_tensors

    def _fields(self, count: int) -> dict[str, Any]:
        return {self._string(): self._value(self._number("I")) for _ in range(count)}

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        """(shape, type, offset)"""
        shape = self._unpack(f"{self._number('I')}Q")
        kind, offset = self._unpack("IQ")
        return shape, kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        element, count = self._unpack("IQ")
        if element in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[element]}"))
        return [self._value(element) for _ in range(count)]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, code: str) -> Any:
        return self._unpack(code)[0]

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{codes}", self._take(struct.calcsize(f"<{codes}")))

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._data):
            raise ValueError("it is cut short")
        taken = self._data[self._position : end]
        self._position = end
        return taken
