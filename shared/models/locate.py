"""From `--model` to files on this machine. Torch-free: workers, the router and `twostroke up` read `--model` here and nowhere else.

folder, .gguf file or hub id ──> (download) ──> which files hold the weights, the tokenizer, the configuration ──> are they whole
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.base.errors import ConfigError
from shared.models.gguf import config_of, read_metadata

# Everything but weights in other formats or layouts, which can be as large again.
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_HUB_SKIPPED = ["consolidated*", "*/*.safetensors", "*/*.json"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What `--model` names, as files on this machine. All of them exist, and none is a Git LFS pointer.

    `config` and `generation_config` are the JSON objects of those names, empty where there is no such file. Beside GGUF weights
    `config` is what the file itself says: `model_type`, `vocab_size` and `eos_token_id` (a list).
    `tokenizer` is the folder that holds the tokenizer's files and chat templates, or the .gguf file that holds them inside;
    `shared/models/tokenizer.py` loads either. It may lack them: a worker needs no tokenizer.
    """

    folder: Path
    tokenizer: Path
    gguf_file: str | None = None  # name inside `folder` of the file with weights and configuration; None: safetensors
    weight_files: tuple[Path, ...] = ()  # empty where they were not asked for
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)


def locate(model: str, revision: str = "", tokenizer: str = "", *, with_weights: bool = True) -> ModelFiles:
    """The files of a local folder in the Hugging Face layout or with one .gguf file, of a .gguf file alone, or of a hub id, which
    is downloaded if need be (a path never touches the network).

    `tokenizer`, another of these, replaces the model's own. A router does without weights: none are looked for or downloaded.
    Raises ConfigError, in one line, if something is not there."""
    if not model:
        raise ConfigError("--model is missing: a folder with a model, a .gguf file or a hub id")
    path = _path(model, revision, "--model", with_weights)
    folder = path if path.is_dir() else path.parent
    gguf_path = _gguf_path(path)
    files = ModelFiles(
        folder=folder,
        tokenizer=_tokenizer_source(_path(tokenizer, "", "--tokenizer", with_weights=False) if tokenizer else path),
        gguf_file=gguf_path.name if gguf_path else None,
        weight_files=_weight_files(folder, gguf_path) if with_weights else (),
        config=config_of(read_metadata(gguf_path)) if gguf_path else _read_json(folder / "config.json"),
        generation_config=_read_json(folder / "generation_config.json"),
    )
    for file in (*files.weight_files, *(files.tokenizer / name for name in _TOKENIZER_FILES if files.tokenizer.is_dir())):
        _check_whole(file)
    return files


def is_local(model: str) -> bool:
    """Whether `--model` names a path rather than a hub id."""
    path = Path(model).expanduser()
    return path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1


def _path(model: str, revision: str, option: str, with_weights: bool) -> Path:
    """A folder or a .gguf file."""
    path = Path(model).expanduser()
    if not is_local(model):
        return _download(model, revision, option, with_weights)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.absolute()
    raise ConfigError(f"{option} {model}: no such folder or .gguf file")


def _gguf_path(path: Path) -> Path | None:
    """The GGUF file that holds the weights: safetensors go first."""
    if path.is_file():
        _check_whole(path)
        return path
    gguf_files = sorted(path.glob("*.gguf"))
    if not gguf_files or any(path.glob("*.safetensors")):
        return None
    if len(gguf_files) > 1:
        raise ConfigError(f"--model {path} has {len(gguf_files)} .gguf files; name one of them")
    _check_whole(gguf_files[0])
    return gguf_files[0]


def _tokenizer_source(path: Path) -> Path:
    """A tokenizer of its own goes before the one inside a GGUF file, which says less."""
    folder = path if path.is_dir() else path.parent
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return folder
    return _gguf_path(path) or folder


def _weight_files(folder: Path, gguf_path: Path | None) -> tuple[Path, ...]:
    """Those that an index names, if there is one: a folder may hold the same weights a second time in another layout."""
    if gguf_path:
        return (gguf_path,)
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{index} has no weight_map")
        files = [folder / name for name in sorted(set(map(str, shards.values())))]
    else:
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"--model {folder} has no weights (*.safetensors or *.gguf)")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder} has no config.json beside its weights")
    return tuple(files)


def _check_whole(file: Path) -> None:
    """Raises ConfigError for a file that is there in name only; `_TOKENIZER_FILES` may all be absent."""
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_POINTER))
    except FileNotFoundError:
        if file.name in _TOKENIZER_FILES and not file.is_symlink():
            return
        raise ConfigError(f"{file} is missing") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if start == _POINTER:
        raise ConfigError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    _check_whole(path)
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} cannot be read: it is not a JSON object")
    return found


def _download(model: str, revision: str, option: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [name for name in _HUB_FILES if with_weights or name != "*.safetensors"]
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=wanted, ignore_patterns=_HUB_SKIPPED))
    except (OSError, ValueError) as error:  # bases of the hub's errors
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{option} {model} is neither a local folder nor a model that can be downloaded: {reason}") from None
