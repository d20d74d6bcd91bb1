"""`--model` and `--tokenizer` as every process reads them: which files they name, and one line for each way to be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli import main
from shared.base.errors import ConfigError
from shared.models.gguf import read_metadata
from shared.models.locate import locate
from shared.models.tokenizer import load_tokenizer
from tests.support.gguf_files import write_tokenizer
from tests.support.tiny_model import save_tiny_model
from tests.support.tiny_tokenizer import EOS_ID, SENTENCES, TEMPLATE, save_tiny_tokenizer, tiny_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:9f86d081884c7d65\nsize 269060552\n"


def refusal(model: Path | str, tokenizer: Path | str = "", *, with_weights: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        locate(str(model), tokenizer=str(tokenizer), with_weights=with_weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is found


def test_a_folder_in_the_hugging_face_layout_is_found_whole(tmp_path):
    files = locate(str(save_tiny_model(tmp_path)))
    assert files.weight_files == (tmp_path / "model.safetensors",)
    assert files.gguf_file is None
    assert files.folder == files.tokenizer == tmp_path
    assert files.config["vocab_size"] == json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert files.generation_config == {"eos_token_id": [0, EOS_ID]}
    assert load_tokenizer(files).chat_template == TEMPLATE


def test_a_router_needs_no_weights_and_a_worker_no_tokenizer(tmp_path):
    save_tiny_tokenizer(tmp_path)
    files = locate(str(tmp_path), with_weights=False)
    assert files.weight_files == ()
    assert load_tokenizer(files).eos_token_id == EOS_ID
    assert "no weights" in refusal(tmp_path)

    save_tiny_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    files = locate(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot load the tokenizer in"):
        load_tokenizer(files)


def test_a_relative_path_stays_the_same_files_after_a_change_of_folder(tmp_path, monkeypatch):
    save_tiny_model(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    files = locate("m")
    assert files.folder == tmp_path / "m"
    assert files.weight_files[0].is_absolute()


def test_shards_are_those_that_the_index_names(tmp_path):
    save_tiny_model(tmp_path)
    for name in ("b.safetensors", "a.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / "model.safetensors").read_bytes())
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert locate(str(tmp_path)).weight_files == (tmp_path / "a.safetensors", tmp_path / "b.safetensors")


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_gguf_file_alone_brings_its_configuration_tokenizer_and_chat_template(as_folder, tmp_path):
    file = write_tokenizer(tmp_path / "tiny.gguf")
    files = locate(str(tmp_path if as_folder else file))
    assert (files.folder, files.gguf_file, files.weight_files, files.tokenizer) == (tmp_path, "tiny.gguf", (file,), file)
    whole = tiny_tokenizer()
    assert files.config == {"model_type": "llama", "vocab_size": whole.get_vocab_size(), "eos_token_id": [EOS_ID, 0]}
    loaded = load_tokenizer(files)
    text = " ".join(SENTENCES) + " <|im_start|>user 12345\n <tool> été<|im_end|>"
    assert loaded.encode(text, add_special_tokens=True) == whole.encode(text).ids
    assert loaded.decode(whole.encode(text).ids) == whole.decode(whole.encode(text).ids, skip_special_tokens=False)
    assert (loaded.eos_token_id, loaded.chat_template) == (EOS_ID, TEMPLATE)


def test_a_tokenizer_beside_a_gguf_file_goes_before_the_one_inside_and_an_option_before_both(tmp_path):
    file = write_tokenizer(tmp_path / "tiny.gguf")
    save_tiny_tokenizer(tmp_path)
    assert locate(str(file)).tokenizer == tmp_path
    (tmp_path / "other").mkdir()
    other = save_tiny_tokenizer(tmp_path / "other")
    assert locate(str(file), tokenizer=str(other)).tokenizer == other
    assert locate(str(other), tokenizer=str(file), with_weights=False).tokenizer == tmp_path
    (tmp_path / "third").mkdir()
    lone = write_tokenizer(tmp_path / "third" / "t.gguf")
    assert locate(str(other), tokenizer=str(lone), with_weights=False).tokenizer == lone


def test_safetensors_go_before_a_gguf_file_in_the_same_folder(tmp_path):
    save_tiny_model(tmp_path)
    write_tokenizer(tmp_path / "tiny.gguf")
    files = locate(str(tmp_path))
    assert (files.gguf_file, files.tokenizer) == (None, tmp_path)


# A GGUF file's tokenizer


def test_digits_are_split_as_the_file_says(tmp_path):
    tokenizer = load_tokenizer(locate(str(write_tokenizer(tmp_path / "t.gguf", pre="smollm"))))
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 123")]
    assert pieces == ["a", "Ġ", "1", "2", "3"]
    tokenizer = load_tokenizer(locate(str(write_tokenizer(tmp_path / "t.gguf", pre="llama-bpe"))))
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1234")]
    assert pieces == ["a", "Ġ", "123", "4"]


def test_a_kind_of_tokenizer_that_is_not_known_is_refused_with_the_remedy(tmp_path):
    files = locate(str(write_tokenizer(tmp_path / "t.gguf", pre="unheard-of")))
    with pytest.raises(ConfigError, match=r"'unheard-of'\); name one with --tokenizer"):
        load_tokenizer(files)


def test_the_token_before_a_prompt_is_added_if_the_file_says_so(tmp_path):
    plain = load_tokenizer(locate(str(write_tokenizer(tmp_path / "t.gguf", bos_token_id=1)))).encode("one")
    begun = load_tokenizer(locate(str(write_tokenizer(tmp_path / "t.gguf", bos_token_id=1, add_bos_token=True)))).encode("one")
    assert begun == [1, *plain]


def test_several_chat_templates_keep_their_names(tmp_path):
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files = locate(str(write_tokenizer(tmp_path / "t.gguf", chat_template=templates)))
    assert load_tokenizer(files).chat_template == {"default": "d", "tool_use": "t"}


def test_a_gguf_file_without_a_tokenizer_says_so(tmp_path):
    files = locate(str(write_tokenizer(tmp_path / "t.gguf")))
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="holds no tokenizer; name one with --tokenizer"):
        load_tokenizer(files)


def test_every_type_of_a_gguf_field_is_read(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    written = {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31), "float32": 0.5,
        "bool": True, "string": "é", "uint64": 2**64 - 1, "int64": -(2**63), "float64": 0.1,
    }  # fmt: skip
    for kind, value in written.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.strings", ["a", "", "bc"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_metadata(tmp_path / "t.gguf")
    assert {name: found[f"x.{name}"] for name in written} == written
    assert (found["x.ints"], found["x.strings"]) == ([1, -2, 3], ["a", "", "bc"])


# What is refused


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "generation_config.json"])
def test_a_git_lfs_pointer_is_named_as_one(name, tmp_path, capsys):
    save_tiny_model(tmp_path)
    (tmp_path / name).write_text(POINTER)
    assert f"{tmp_path / name} is a Git LFS pointer" in refusal(tmp_path)
    assert name == "model.safetensors" or "Git LFS pointer" in refusal(tmp_path, with_weights=False)
    with pytest.raises(SystemExit) as caught:
        main(["up", "--port", "0", "--model", str(tmp_path)])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"error: {tmp_path / name} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder\n"


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_gguf_file_that_is_a_pointer_or_cut_short_is_one_line(as_folder, tmp_path):
    file = write_tokenizer(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    model = tmp_path if as_folder else file
    file.write_text(POINTER)
    assert f"{file} is a Git LFS pointer" in refusal(model)
    for content in (b"", b"GGUF", b"GGML" + whole[4:], whole[:200], whole[:4] + b"\x09" + whole[5:]):
        file.write_bytes(content)
        assert f"{file} cannot be read as a GGUF file: " in refusal(model)


def test_a_shard_that_is_missing_or_a_pointer_is_named(tmp_path):
    save_tiny_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors", "y": "second.safetensors"}}))
    assert refusal(tmp_path) == f"{tmp_path / 'second.safetensors'} is missing"
    (tmp_path / "second.safetensors").write_text(POINTER)
    assert "second.safetensors is a Git LFS pointer" in refusal(tmp_path)
    for content in ("{}", '{"weight_map": []}'):
        index.write_text(content)
        assert refusal(tmp_path) == f"{index} has no weight_map"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_configuration_that_is_no_json_object_is_named(content, tmp_path):
    save_tiny_model(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    assert refusal(tmp_path).startswith(f"{tmp_path / 'config.json'} cannot be read: ")


def test_weights_without_a_configuration_are_refused(tmp_path):
    save_tiny_model(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path)


def test_two_gguf_files_are_not_guessed_between(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_tokenizer(tmp_path / name)
    assert f"{tmp_path} has 2 .gguf files; name one of them" in refusal(tmp_path)


def test_a_path_that_is_not_there_and_a_folder_without_weights_are_refused_by_the_options_name(tmp_path):
    assert refusal(tmp_path / "nothing") == f"--model {tmp_path / 'nothing'}: no such folder or .gguf file"
    assert "no weights" in refusal(tmp_path)
    assert "--model is missing" in refusal("")
    save_tiny_tokenizer(tmp_path)
    assert refusal(tmp_path, "/no/tokenizer", with_weights=False).startswith("--tokenizer /no/tokenizer: no such folder")


def test_a_hub_id_that_cannot_be_had_is_one_line_of_error(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "--model someone/something is neither" in refusal("someone/something")
    save_tiny_tokenizer(tmp_path)
    assert "--tokenizer someone/something is neither" in refusal(tmp_path, "someone/something", with_weights=False)


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_hub_id_is_downloaded_by_revision_with_weights_only_where_they_are_wanted(with_weights, monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(model, **options):
        asked.update(options, model=model)
        return str(save_tiny_model(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert locate("someone/something", "r1", with_weights=with_weights).folder == tmp_path
    assert (asked["model"], asked["revision"]) == ("someone/something", "r1")
    assert ("*.safetensors" in asked["allow_patterns"]) is with_weights
