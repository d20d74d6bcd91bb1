"""Weights on disk as a table of named tensors, read one at a time.

Safetensors files are mapped, not read: a tensor's bytes come into memory when it is copied to its place, so loading takes the
model's own size and little more. A GGUF file goes through transformers, which unpacks it into float32 as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.base.errors import ConfigError
from shared.models.locate import ModelFiles

_MAX_NAMED = 5

_BUFFERS = "rotary_emb."  # in some old checkpoints: tables that follow from the configuration


@dataclass(frozen=True, slots=True)
class Checkpoint:
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype  # of its matrices
    read: Callable[[str], Tensor]

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ConfigError, naming tensors that are missing, unexpected or of the wrong shape."""
        missing = [name for name in expected if name not in self.shapes]
        unexpected = [name for name in self.shapes if name not in expected and _BUFFERS not in name]
        misshapen = [
            f"{name} is {list(self.shapes[name])}, should be {list(shape)}"
            for name, shape in expected.items()
            if name in self.shapes and self.shapes[name] != shape
        ]
        problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
        if any(problems.values()):
            text = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
            raise ConfigError(f"the weights do not fit the model's configuration: {text}")

    def with_alias(self, name: str, stored_name: str) -> Checkpoint:
        """The same with one tensor, if it is there, under a second name too."""
        if stored_name not in self.shapes:
            return self
        shapes = {**self.shapes, name: self.shapes[stored_name]}
        return replace(self, shapes=shapes, read=lambda wanted: self.read(stored_name if wanted == name else wanted))


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Raises ConfigError if the files are damaged."""
    return _gguf(files) if files.gguf_file else _safetensors(files)


def _safetensors(files: ModelFiles) -> Checkpoint:
    slices: dict[str, Any] = {}
    for path in files.weight_files:
        handle = _open(path)
        names = handle.keys()
        slices |= {name: handle.get_slice(name) for name in names}
    shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
    matrix = next((piece for name, piece in slices.items() if len(shapes[name]) == 2), None)
    if matrix is None:
        raise ConfigError(f"{files.folder} has no weights: its .safetensors files hold no matrix")
    return Checkpoint(shapes, matrix[:1].dtype, lambda name: slices[name][:])


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _gguf(files: ModelFiles) -> Checkpoint:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(files.folder, gguf_file=files.gguf_file, dtype=torch.float32)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{files.weight_files[0]} cannot be read: {str(error).splitlines()[0]}") from None
    tensors = model.state_dict()
    # GGUF weights are quantized, mostly to 4 to 8 bits: bfloat16 holds what they hold.
    return Checkpoint({name: tuple(t.shape) for name, t in tensors.items()}, torch.bfloat16, tensors.__getitem__)


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
