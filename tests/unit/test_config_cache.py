"""A configuration that was read before is the same the next time, and is read anew when anything that it follows from changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.models import config_cache
from shared.models.config import read_config
from shared.models.config_cache import cached_config
from shared.models.locate import ModelFiles, locate
from tests.support.engine import make_tiny_model

KINDS = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "configs"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[ModelFiles]:
    """Those that were not known."""
    asked: list[ModelFiles] = []

    def read(files: ModelFiles) -> Any:
        asked.append(files)
        return read_config(files)

    monkeypatch.setattr(config_cache, "read_config", read)
    return asked


def model(folder: Path, kind: str = "llama", **changes: Any) -> ModelFiles:
    if not (folder / "config.json").exists():
        make_tiny_model(kind, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return locate(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_once_is_the_same_the_next_time(tmp_path: Path, reads: list[ModelFiles], kind: str) -> None:
    files = model(tmp_path / "m", kind)
    first, second = cached_config(files), cached_config(files)
    assert first == second == read_config(files)
    assert len(reads) == 1


def test_another_config_another_version_and_other_code_are_read_anew(
    tmp_path: Path, reads: list[ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_config(model(tmp_path / "m"))
    assert cached_config(model(tmp_path / "m", rms_norm_eps=0.25)).rms_norm_eps == 0.25
    assert len(reads) == 2
    monkeypatch.setattr(config_cache, "version", lambda package: "0.0.1")
    cached_config(model(tmp_path / "m"))
    assert len(reads) == 3
    monkeypatch.setattr(config_cache, "_CODE", ("locate.py",))
    cached_config(model(tmp_path / "m"))
    assert len(reads) == 4
    cached_config(model(tmp_path / "m"))
    assert len(reads) == 4


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"num_layers": 1}', b"null", b'{"a": 1}'])
def test_an_entry_that_cannot_be_read_is_replaced(tmp_path: Path, cache: Path, reads: list[ModelFiles], content: bytes) -> None:
    files = model(tmp_path / "m")
    expected = cached_config(files)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    assert cached_config(files) == expected
    assert cached_config(files) == expected
    assert len(reads) == 2
    assert list(cache.iterdir()) == [entry]


def test_without_room_for_entries_the_configuration_is_read_each_time(
    tmp_path: Path, reads: list[ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", "/dev/full/cache")
    files = model(tmp_path / "m")
    assert cached_config(files) == cached_config(files)
    assert len(reads) == 2


def test_a_known_configuration_needs_no_transformers(tmp_path: Path) -> None:
    """Which takes a worker seconds to import."""
    cached_config(model(tmp_path / "m"))
    script = (
        "import sys; from shared.models.config_cache import cached_config; from shared.models.locate import locate; "
        f"cached_config(locate({str(tmp_path / 'm')!r})); print('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
