"""The decoder and its loading against transformers, on tiny random models of every supported kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from shared.base.errors import ConfigError
from shared.engine.compute.batch import build_batch, known_token_ids
from shared.engine.compute.runner import ModelRunner
from shared.engine.schedule.plan import Plan
from shared.engine.schedule.sequence import Sequence
from shared.models.checkpoint import open_checkpoint
from shared.models.dtype import choose_dtype, has_native_bfloat16
from shared.models.locate import locate
from tests.support.engine import KINDS, VOCAB_SIZE, make_sequence, make_tiny_model, schedule, tiny_runner
from tests.support.gguf_files import write_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def random_ids(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def step_logits(runner: ModelRunner, work: list[tuple[Sequence, int]]) -> list[Tensor]:
    """One step of (sequence, number of its next tokens); logits of all its tokens, per sequence."""
    plan = Plan(tuple(schedule(sequence, count) for sequence, count in work))
    batch = build_batch(plan, runner.pool.geometry.block_size, CPU)
    logits = runner.model.logits(runner.model.forward(torch.from_numpy(known_token_ids(plan)), runner.pool.layers, batch.attention))
    for sequence, count in work:
        sequence.num_computed_tokens += count
    return list(logits.split([count for _, count in work]))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_in_one_pass_in_chunks_and_in_decode_steps(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model(kind, tmp_path)
    ids, other = random_ids(45, seed=1), random_ids(23, seed=2)
    with torch.no_grad():
        expected, expected_other = model(torch.tensor([ids])).logits[0], model(torch.tensor([other])).logits[0]
    runner = tiny_runner(tmp_path)

    whole = step_logits(runner, [(make_sequence(ids, 1, 3), 45)])[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    # Chunks of one sequence that share steps with another one's chunks and, at last, with its decode steps.
    a, b = make_sequence(ids, 10, 3), make_sequence(other, 20, 2)
    parts_a, parts_b = [], []
    for num_a, num_b in ((17, 5), (13, 16)):
        part_a, part_b = step_logits(runner, [(a, num_a), (b, num_b)])
        parts_a.append(part_a)
        parts_b.append(part_b)
    for _ in range(2):
        part_b, part_a = step_logits(runner, [(b, 1), (a, 6)])
        parts_a.append(part_a)
        parts_b.append(part_b)
    parts_a += [step_logits(runner, [(a, 1)])[0] for _ in range(3)]
    torch.testing.assert_close(torch.cat(parts_a), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(parts_b), expected_other, atol=1e-4, rtol=1e-4)


def test_greedy_tokens_of_the_runner_equal_generate(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path)
    model.generation_config.eos_token_id = None
    prompts = [random_ids(n, seed=n) for n in (5, 21, 33)]
    sequences = [make_sequence(ids, 1 + 10 * i, 5) for i, ids in enumerate(prompts)]
    runner = tiny_runner(tmp_path)
    for _ in range(20):
        plan = Plan(tuple(schedule(s) for s in sequences))
        for sequence, samples in zip(sequences, runner.execute(plan), strict=True):
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids.append(samples[0].token_id)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert sequence.token_ids == expected[0].tolist()


def test_a_sharded_checkpoint_loads_like_a_single_file_and_ignores_a_second_copy(tmp_path: Path) -> None:
    model = make_tiny_model("qwen2", tmp_path, max_shard_size="60KB")
    assert len(locate(str(tmp_path)).weight_files) > 2
    save_file({"other_layout": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")
    ids = random_ids(20, seed=3)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    logits = step_logits(tiny_runner(tmp_path), [(make_sequence(ids, 1, 2), 20)])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_gguf_file_and_a_folder_with_only_one_load_like_the_model_it_was_made_of(tmp_path: Path) -> None:
    model = make_tiny_model("qwen2", tmp_path / "safetensors")
    (tmp_path / "gguf").mkdir()
    write_model(model, tmp_path / "gguf" / "tiny.gguf")
    ids = random_ids(20, seed=6)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    for path in (tmp_path / "gguf" / "tiny.gguf", tmp_path / "gguf"):
        logits = step_logits(tiny_runner(path, dtype="float32"), [(make_sequence(ids, 1, 2), 20)])[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_weights_are_converted_to_the_type_asked_for(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path)
    ids = random_ids(20, seed=4)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    runner = tiny_runner(tmp_path, dtype="bfloat16")
    assert runner.pool.kv.dtype is torch.bfloat16
    assert runner.pool.geometry.kv_dtype == "bfloat16"
    logits = step_logits(runner, [(make_sequence(ids, 1, 2), 20)])[0]
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


def test_the_weights_are_a_copy_so_that_changing_the_file_changes_nothing(tmp_path: Path) -> None:
    make_tiny_model("llama-tied", tmp_path)
    ids = random_ids(9, seed=5)
    runner = tiny_runner(tmp_path)
    before = step_logits(runner, [(make_sequence(ids, 1, 2), 9)])[0]
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(b"\0" * (file.stat().st_size // 2))
    torch.testing.assert_close(step_logits(runner, [(make_sequence(ids, 1, 2), 9)])[0], before, atol=0, rtol=0)


def change_weights(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def logits_of_both(folder: Path, num_tokens: int = 20) -> tuple[Tensor, Tensor]:
    """Ours, and those of transformers with the same files."""
    ids = random_ids(num_tokens, seed=8)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    return step_logits(tiny_runner(folder), [(make_sequence(ids, 1, 8), num_tokens)])[0], expected


def test_a_head_stored_beside_the_embedding_that_it_is_said_to_share_counts(tmp_path: Path) -> None:
    make_tiny_model("llama-tied", tmp_path)
    ours, shared = logits_of_both(tmp_path)
    torch.testing.assert_close(ours, shared, atol=1e-4, rtol=1e-4)

    def store_an_equal_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def train_the_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] *= -1.0

    change_weights(tmp_path / "model.safetensors", store_an_equal_head)
    torch.testing.assert_close(logits_of_both(tmp_path)[0], ours, atol=0, rtol=0)
    change_weights(tmp_path / "model.safetensors", train_the_head)
    trained, expected = logits_of_both(tmp_path)
    torch.testing.assert_close(trained, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(trained, -ours, atol=1e-4, rtol=1e-4)


def test_a_shared_matrix_may_be_stored_under_the_heads_name_alone(tmp_path: Path) -> None:
    make_tiny_model("llama-tied", tmp_path)
    before, _ = logits_of_both(tmp_path)
    change_weights(
        tmp_path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")})
    )
    after, expected = logits_of_both(tmp_path)
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, before, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_an_embedding_or_head_that_is_not_there_under_any_name_is_missing(kind: str, tmp_path: Path) -> None:
    make_tiny_model(kind, tmp_path)
    name = "lm_head.weight" if kind == "llama" else "model.embed_tokens.weight"
    change_weights(tmp_path / "model.safetensors", lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=f"missing: .*{name}"):
        tiny_runner(tmp_path)


def test_tables_of_rotary_embeddings_in_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    before, _ = logits_of_both(tmp_path)
    buffers = {
        f"model.layers.{i}.self_attn.rotary_emb.{name}": torch.zeros(4) for i in range(3) for name in ("inv_freq", "cos_cached")
    }
    buffers["model.rotary_emb.inv_freq"] = torch.zeros(4)
    change_weights(tmp_path / "model.safetensors", lambda tensors: tensors.update(buffers))
    torch.testing.assert_close(logits_of_both(tmp_path)[0], before, atol=0, rtol=0)


def test_a_window_that_another_model_left_in_a_llamas_configuration_is_ignored_as_in_transformers(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    before, _ = logits_of_both(tmp_path, num_tokens=60)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 12}))
    after, expected = logits_of_both(tmp_path, num_tokens=60)
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, before, atol=0, rtol=0)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(8)
    tensors["model.norm.weight"] = torch.zeros(47)
    save_file(tensors, file)
    with pytest.raises(ConfigError) as caught:
        tiny_runner(tmp_path)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "misshapen: model.norm.weight is [47], should be [48]" in message


def test_a_damaged_file_is_an_operators_error_that_names_it(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        open_checkpoint(locate(str(tmp_path)))


def test_auto_dtype_is_the_checkpoints_on_a_gpu_and_one_that_is_fast_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n")
    assert has_native_bfloat16(cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f\n")
    assert not has_native_bfloat16(cpuinfo)
    assert not has_native_bfloat16(tmp_path / "nothing")

    for native in (True, False):
        monkeypatch.setattr("shared.models.dtype.has_native_bfloat16", lambda native=native: native)
        assert choose_dtype("auto", torch.bfloat16, CPU) is (torch.bfloat16 if native else torch.float32)
        assert choose_dtype("auto", torch.float16, CPU) is torch.float32
        assert choose_dtype("auto", torch.float16, CUDA) is torch.float16
        assert choose_dtype("bfloat16", torch.float32, CPU) is torch.bfloat16
