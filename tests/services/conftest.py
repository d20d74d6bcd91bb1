"""A small tokenizer, loaded once per module."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.router.text.tokenizer import ChatTokenizer
from tests.support.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(str(model_folder))


@pytest.fixture(scope="module")
def raw(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))
