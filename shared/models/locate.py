"""From `--model` to files on this machine. Torch-free: the router finds its tokenizer the same way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shared.base.errors import ConfigError

# Everything but weights in other formats or layouts, which can be as large again.
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_HUB_SKIPPED = ["consolidated*", "*/*"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    folder: Path
    gguf_file: str | None = None  # name inside `folder`; None: safetensors

    @property
    def weight_files(self) -> list[Path]:
        """Those that an index names, if there is one: a folder may hold the same weights a second time in another layout."""
        if self.gguf_file:
            return [self.folder / self.gguf_file]
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return [self.folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        whole = self.folder / "model.safetensors"
        return [whole] if whole.is_file() else sorted(self.folder.glob("*.safetensors"))


def locate(model: str, revision: str = "") -> ModelFiles:
    """The files of a local folder, a local .gguf file, or a hub id, which is downloaded if need be (a path never touches the
    network). Raises ConfigError if there is no such model."""
    if not model:
        raise ConfigError("--model is missing: a folder with a model, a .gguf file or a hub id")
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.parent, path.name)
    if path.is_dir():
        return _in_folder(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"--model {model}: no such folder or .gguf file")
    return _in_folder(_download(model, revision))


def _in_folder(folder: Path) -> ModelFiles:
    if any(folder.glob("*.safetensors")):
        return ModelFiles(folder)
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelFiles(folder, gguf_files[0].name)
    if gguf_files:
        raise ConfigError(f"{folder} has {len(gguf_files)} .gguf files; name one of them in --model")
    raise ConfigError(f"{folder} has no weights (*.safetensors or *.gguf)")


def _download(model: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED))
    except (OSError, ValueError) as error:  # bases of the hub's errors
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model {model} is neither a local folder nor a model that can be downloaded: {reason}") from None
