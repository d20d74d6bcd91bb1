"""The identity of weights: what changes it, what does not, and when it may be taken from the last start."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.base.errors import ConfigError
from shared.models import digest as module
from shared.models.digest import weights_digest
from shared.models.locate import locate
from tests.support.gguf_files import write_tokenizer
from tests.support.tiny_model import save_tiny_model

HOUR_NS = 3_600_000_000_000


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose bytes were hashed."""
    seen: list[Path] = []
    tensors = module._tensors

    def counted(path: Path, is_gguf: bool):
        seen.append(path)
        return tensors(path, is_gguf)

    monkeypatch.setattr(module, "_tensors", counted)
    return seen


def digest_of(folder: Path) -> str:
    return weights_digest(locate(str(folder)))


def later() -> int:
    """A clock that says that all files have been there for an hour."""
    return time.time_ns() + HOUR_NS


# What counts


def test_every_tensor_counts_down_to_a_single_bit(folder):
    whole = digest_of(folder)
    assert len(whole) == 32
    file = folder / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    seen = {whole}
    for name, tensor in header.items():
        for offset in (tensor["data_offsets"][0], tensor["data_offsets"][1] - 1):
            changed = bytearray(content)
            changed[start + offset] ^= 1
            file.write_bytes(changed)
            seen.add(digest_of(folder))
            assert name
    assert len(seen) == 1 + 2 * len(header)
    file.write_bytes(content)
    assert digest_of(folder) == whole


def test_a_fine_tune_of_one_tensor_in_the_middle_of_a_large_file_is_another_model(tmp_path, folder):
    weights = load_file(folder / "model.safetensors")
    bulky = weights | {f"a{i}": np.full((1 << 19,), i, np.float32) for i in range(3)}  # 2 MiB each, more than samples would see
    save_file(bulky, folder / "model.safetensors")
    before = digest_of(folder)
    bulky["a1"][1 << 18] += 1
    save_file(bulky, folder / "model.safetensors")
    assert digest_of(folder) != before


def test_a_name_a_type_and_a_shape_count(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    seen = {digest_of(folder)}
    norm = weights.pop("model.norm.weight")
    for changed in (
        {"model.other.weight": norm},
        {"model.norm.weight": norm.reshape(2, -1)},
        {"model.norm.weight": norm.view(np.int32)},
        {},
    ):
        save_file(weights | changed, file)
        seen.add(digest_of(folder))
    assert len(seen) == 5


def test_two_tensors_that_swap_their_values_are_another_model(folder):
    file = folder / "model.safetensors"
    weights, before = load_file(file), digest_of(folder)
    a, b = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    weights[a], weights[b] = weights[b], weights[a]
    save_file(weights, file)
    assert digest_of(folder) != before


def test_the_configuration_counts_less_where_and_by_what_it_was_saved(folder):
    before = digest_of(folder)
    config = json.loads((folder / "config.json").read_text())
    saved_again = dict(reversed(config.items())) | {"_name_or_path": "/x", "transformers_version": "9.9"}
    (folder / "config.json").write_text(json.dumps(saved_again, indent=7))
    assert digest_of(folder) == before
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10001.0}))
    assert digest_of(folder) != before


def test_a_copy_a_new_name_and_shards_change_nothing(folder, tmp_path):
    before = digest_of(folder)
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert digest_of(copy) == before
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    assert digest_of(copy) == before

    weights = load_file(copy / "weights.safetensors")
    (copy / "weights.safetensors").unlink()
    names = sorted(weights, reverse=True)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, copy / shard, {"format": "pt"})
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest_of(copy) == before


def test_a_gguf_file_counts_byte_by_byte(tmp_path):
    file = write_tokenizer(tmp_path / "a.gguf")
    before = digest_of(file)
    assert digest_of(file.rename(tmp_path / "b.gguf")) == before
    content = bytearray((tmp_path / "b.gguf").read_bytes())
    content[len(content) // 2] ^= 1
    files = locate(str(tmp_path / "b.gguf"))
    (tmp_path / "b.gguf").write_bytes(content)
    assert weights_digest(files) != before


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_is_an_operators_error(content, folder):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be hashed"):
        digest_of(folder)


def test_a_file_that_is_cut_short_is_an_operators_error(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="cut short"):
        digest_of(folder)


# What is kept


def test_a_second_start_hashes_nothing(folder, hashed):
    files = locate(str(folder))
    first = weights_digest(files, later)
    assert hashed == [folder / "model.safetensors"]
    assert weights_digest(files, later) == first
    assert len(hashed) == 1


def test_a_file_changed_since_is_hashed_again_even_if_its_size_and_time_are_the_same(folder, hashed):
    files, file = locate(str(folder)), folder / "model.safetensors"
    first, times = weights_digest(files, later), file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    other = folder / "other"
    other.write_bytes(content)
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)
    second = weights_digest(files, later)
    assert second != first
    assert len(hashed) == 2
    assert weights_digest(files, later) == second
    assert len(hashed) == 2


def test_a_file_that_was_written_just_now_is_not_kept(folder, hashed):
    files = locate(str(folder))
    for _ in range(2):
        weights_digest(files)
    assert len(hashed) == 2


def test_a_changed_configuration_counts_although_the_tensors_are_kept(folder, hashed):
    first = weights_digest(locate(str(folder)), later)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert weights_digest(locate(str(folder)), later) != first
    assert len(hashed) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"digest": 3}', '{"files": [], "digest": "' + "0" * 32 + '"}'])
def test_what_is_kept_is_ignored_and_written_anew_if_it_is_of_no_use(content, folder, hashed, tmp_path):
    files = locate(str(folder))
    first = weights_digest(files, later)
    (kept,) = (tmp_path / "cache" / "digests").iterdir()
    good = kept.read_text()
    kept.write_text(content)
    assert weights_digest(files, later) == first
    assert len(hashed) == 2
    assert kept.read_text() == good


def test_a_kept_digest_that_is_none_is_not_believed(folder, tmp_path):
    files = locate(str(folder))
    first = weights_digest(files, later)
    (kept,) = (tmp_path / "cache" / "digests").iterdir()
    for wrong in ("", "x", 5, None):
        kept.write_text(json.dumps(json.loads(kept.read_text()) | {"digest": wrong}))
        assert weights_digest(files, later) == first


def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert weights_digest(locate(str(folder)), later) == digest_of(folder)


def test_a_file_that_changes_while_it_is_hashed_is_not_kept(folder, monkeypatch, tmp_path):
    tensors = module._tensors

    def changing(path, is_gguf):
        found = list(tensors(path, is_gguf))
        os.utime(path)
        return iter(found)

    monkeypatch.setattr(module, "_tensors", changing)
    weights_digest(locate(str(folder)), later)
    assert not (tmp_path / "cache").exists()
