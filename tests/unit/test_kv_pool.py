"""The KV pool as bytes, and how large it is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.base.errors import ConfigError, CorruptTransfer
from shared.base.worker_info import KvGeometry, Role
from shared.engine.memory import sizing
from shared.engine.memory.block_part import BlockPart
from shared.engine.memory.kv_pool import KvPool
from shared.engine.memory.main_memory import available_memory_bytes
from shared.kernels.reference import ReferenceKernels
from shared.options.worker import WorkerConfig
from tests.support.engine import make_tiny_model, tiny_runner

GEOMETRY = KvGeometry("digest", "bfloat16", num_layers=3, num_kv_heads=4, head_dim=8, block_size=16, kv_dtype="bfloat16")
WHOLE = BlockPart.whole(GEOMETRY)
CPU = torch.device("cpu")


def filled_pool(seed: int) -> KvPool:
    pool = KvPool(GEOMETRY, 9, CPU, ReferenceKernels())
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_block_is_one_run_of_bytes_in_the_stated_layout() -> None:
    pool = KvPool(GEOMETRY, 9, CPU, ReferenceKernels())
    assert pool.kv.shape == (9, 3, 2, 4, 16, 8)
    assert pool.kv[1].is_contiguous()
    assert pool.kv[1].nbytes == GEOMETRY.block_bytes
    assert not pool.kv.any()
    assert pool.layers[2].values.data_ptr() == pool.kv[0, 2].data_ptr()


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_what_is_read_from_one_pool_and_written_to_another_is_the_same(wrap: type) -> None:
    source, target = filled_pool(1), filled_pool(2)
    untouched = target.kv.clone()
    data = source.read_blocks([7, 2, 5], WHOLE.layers)
    assert len(data) == 3 * GEOMETRY.block_bytes
    assert bytes(data) == raw(source.kv[[7, 2, 5]])
    target.write_blocks([3, 8, 1], wrap(data), WHOLE)
    assert torch.equal(target.kv[[3, 8, 1]], source.kv[[7, 2, 5]])
    others = [0, 2, 4, 5, 6, 7]
    assert torch.equal(target.kv[others], untouched[others])


def test_ranges_of_layers_and_heads_are_written_to_their_place_and_nowhere_else() -> None:
    source, target = filled_pool(3), filled_pool(4)
    expected = target.kv.clone()
    expected[[4, 6], 1:3, :, 2:3] = source.kv[[1, 2], 1:3, :, 2:3]
    target.write_blocks([4, 6], raw(source.kv[[1, 2], 1:3, :, 2:3]), BlockPart(range(1, 3), range(2, 3)))
    assert torch.equal(target.kv, expected)


@pytest.mark.parametrize(
    ("block_ids", "size_blocks", "part"),
    [
        ([1, 2], 1.5, WHOLE),
        ([1, 2], 3, WHOLE),
        ([0], 1, WHOLE),
        ([9], 1, WHOLE),
        ([], 0, WHOLE),
        ([1], 1, BlockPart(range(1, 4), range(4))),
        ([1], 1, BlockPart(range(3), range(1, 5))),
        ([1], 0, BlockPart(range(0), range(4))),
        ([1], 0, BlockPart(range(3), range(0))),
        ([1], 1, BlockPart(range(-1, 2), range(4))),
    ],
)
def test_a_wrong_size_or_range_is_corrupt_and_changes_nothing(block_ids: list[int], size_blocks: float, part: BlockPart) -> None:
    pool = filled_pool(5)
    before = pool.kv.clone()
    with pytest.raises(CorruptTransfer):
        pool.write_blocks(block_ids, bytes(int(size_blocks * GEOMETRY.block_bytes)), part)
    assert torch.equal(pool.kv, before)


def test_copies_are_of_whole_blocks() -> None:
    pool = filled_pool(6)
    expected = pool.kv.clone()
    expected[4], expected[5] = expected[1], expected[1]
    pool.copy([(1, 4), (1, 5)])
    pool.copy([])
    assert torch.equal(pool.kv, expected)


def test_the_storage_can_be_somebody_elses() -> None:
    memory = torch.zeros(9 * GEOMETRY.block_bytes, dtype=torch.uint8)
    pool = KvPool(GEOMETRY, 9, CPU, ReferenceKernels(), storage=lambda size_bytes, device: memory)
    pool.kv.fill_(1.0)
    assert memory.view(torch.bfloat16).eq(1.0).all()


# Sizing


def config(**options: object) -> WorkerConfig:
    return WorkerConfig(model="m", **options)  # type: ignore[arg-type]


def test_the_default_pool_on_a_cpu_is_a_share_of_memory_and_no_more_than_is_useful() -> None:
    block_bytes = GEOMETRY.block_bytes
    assert sizing.cpu_num_blocks(config(), GEOMETRY, 1 << 20, 1000 * block_bytes) == 250
    assert sizing.cpu_num_blocks(config(), GEOMETRY, 1 << 30, 1 << 40) == (2 << 30) // block_bytes
    assert sizing.cpu_num_blocks(config(max_num_seqs=3), GEOMETRY, 33, 1 << 40) == 3 * 3 + 1


def test_flags_for_the_pool_are_obeyed_or_refused_with_numbers() -> None:
    assert sizing.cpu_num_blocks(config(num_blocks=77), GEOMETRY, 64, 1 << 40) == 77
    assert sizing.cpu_num_blocks(config(kv_cache_memory=1 << 20), GEOMETRY, 64, 1 << 40) == (1 << 20) // GEOMETRY.block_bytes
    with pytest.raises(ConfigError, match=r"--kv-cache-memory asks for 4.00 GiB, but 1.00 GiB"):
        sizing.cpu_num_blocks(config(kv_cache_memory=4 << 30), GEOMETRY, 64, 1 << 30)


def test_a_pool_that_cannot_hold_one_longest_sequence_is_refused(tmp_path: Path) -> None:
    sizing.check_pool(5, GEOMETRY, 64)
    with pytest.raises(ConfigError, match=r"64 tokens needs 5 KV blocks .* has 4 .* --max-model-len to 48 or less"):
        sizing.check_pool(4, GEOMETRY, 64)
    make_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="--num-blocks"):
        tiny_runner(tmp_path, num_blocks=16)
    assert tiny_runner(tmp_path, num_blocks=17).pool.num_blocks == 17


def test_a_longest_sequence_above_the_models_own_is_refused() -> None:
    assert sizing.choose_max_model_len(None, 256) == 256
    assert sizing.choose_max_model_len(100, 256) == 100
    with pytest.raises(ConfigError, match="--max-model-len is 257, but the model was made for at most 256 tokens"):
        sizing.choose_max_model_len(257, 256)


def test_weights_that_do_not_fit_are_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match=r"the weights take 1048576.00 GiB, but cpu has .* use a smaller model"):
        sizing.check_weights_fit(1 << 50, CPU)


def test_a_steps_tokens_are_by_role_unless_given() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert sizing.max_step_tokens(config(), Role.PREFILL, cpu) == 2048
    assert sizing.max_step_tokens(config(), Role.DECODE, cpu) == 256
    assert sizing.max_step_tokens(config(), Role.COLOCATED, cuda) == 512
    assert sizing.max_step_tokens(config(max_num_seqs=300), Role.DECODE, cpu) == 300
    assert sizing.max_step_tokens(config(max_num_batched_tokens=64), Role.PREFILL, cpu) == 64


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_available_memory_is_the_machines_or_what_the_container_leaves(tmp_path: Path) -> None:
    meminfo = {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable:    3000 kB\n"}
    assert available_memory_bytes(write_files(tmp_path / "bare", meminfo)) == 3000 * 1024
    unified = meminfo | {
        "proc/self/cgroup": "0::/pod/worker\n",
        "sys/fs/cgroup/pod/memory.max": "1000000\n",
        "sys/fs/cgroup/pod/memory.current": "600000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 1\nfile 100000\nfile_mapped 5\n",
        "sys/fs/cgroup/pod/worker/memory.max": "max\n",
        "sys/fs/cgroup/pod/worker/memory.current": "600000\n",
    }
    assert available_memory_bytes(write_files(tmp_path / "v2", unified)) == 500_000
    legacy = meminfo | {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/y\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000\n",
    }
    assert available_memory_bytes(write_files(tmp_path / "v1", legacy)) == 1_500_000
