"""How long a sequence may be, how many tokens a step takes, and how many KV blocks fit. What cannot work is refused here, in one
line that names the numbers and the flags that help."""

from __future__ import annotations

import torch

from shared.base.blocks_of import num_blocks_of
from shared.base.errors import ConfigError
from shared.base.worker_info import KvGeometry, Role
from shared.engine.memory.main_memory import available_memory_bytes
from shared.options.worker import WorkerConfig

_PREFILL_STEP_TOKENS = 2048
# Where sequences decode they wait for the whole step. A CPU is at its peak with fewer rows than a GPU is.
_DECODE_STEP_TOKENS = {"cpu": 256, "cuda": 512}

# On a CPU the pool shares memory with all else that runs there, so it takes less than it could unless told.
_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 2 << 30


def choose_max_model_len(wanted: int | None, max_position: int) -> int:
    if wanted is not None and wanted > max_position:
        raise ConfigError(f"--max-model-len is {wanted}, but the model was made for at most {max_position} tokens")
    return wanted or max_position


def max_step_tokens(config: WorkerConfig, role: Role, device: torch.device) -> int:
    """The token budget of a step. Unless told, as much as suits role and device, and at least a token for each running sequence."""
    suitable = _PREFILL_STEP_TOKENS if role is Role.PREFILL else _DECODE_STEP_TOKENS[device.type]
    return config.max_num_batched_tokens or max(suitable, config.max_num_seqs)


def check_weights_fit(size_bytes: int, device: torch.device) -> None:
    """Called before weights are read, so that a model that is too large fails at once and not by the kernel's hand."""
    free = free_memory_bytes(device)
    if size_bytes > free:
        raise ConfigError(
            f"the weights take {_gib(size_bytes)}, but {device.type} has {_gib(free)} of free memory; "
            "use a smaller model or a narrower --dtype"
        )


def free_memory_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()


def cpu_num_blocks(config: WorkerConfig, geometry: KvGeometry, max_model_len: int, available_bytes: int) -> int:
    """Blocks of the pool on a CPU, whose weights are loaded already. Raises ConfigError if --kv-cache-memory is not there."""
    if config.num_blocks is not None:
        _check_memory(config.num_blocks * geometry.block_bytes, available_bytes, f"--num-blocks {config.num_blocks}")
        return config.num_blocks
    if config.kv_cache_memory is not None:
        _check_memory(config.kv_cache_memory, available_bytes, "--kv-cache-memory")
        return config.kv_cache_memory // geometry.block_bytes
    most_useful = config.max_num_seqs * num_blocks_of(max_model_len, geometry.block_size) + 1
    share = min(int(available_bytes * _CPU_SHARE), _CPU_MOST_BYTES)
    return min(share // geometry.block_bytes, most_useful)


def gpu_num_blocks(config: WorkerConfig, geometry: KvGeometry, device: torch.device, step_bytes: int) -> int:
    """Blocks of the pool on a GPU, whose weights are loaded already; a step needs `step_bytes` besides (measured)."""
    if config.num_blocks is not None:
        return config.num_blocks
    free, total = torch.cuda.mem_get_info(device)
    used = total - free  # by weights, the CUDA context and other processes
    return max(0, int(total * config.gpu_memory_utilization) - used - step_bytes) // geometry.block_bytes


def check_pool(num_blocks: int, geometry: KvGeometry, max_model_len: int) -> None:
    """One sequence of max_model_len must fit: otherwise it could never finish."""
    needed = num_blocks_of(max_model_len, geometry.block_size) + 1  # and the null block
    if num_blocks < needed:
        fits = max(0, num_blocks - 1) * geometry.block_size
        raise ConfigError(
            f"a sequence of {max_model_len} tokens needs {needed} KV blocks ({_gib(needed * geometry.block_bytes)}), but the pool "
            f"has {num_blocks} ({_gib(num_blocks * geometry.block_bytes)}): lower --max-model-len to {fits} or less, or raise "
            "--num-blocks, --kv-cache-memory (CPU) or --gpu-memory-utilization (GPU)"
        )


def _check_memory(size_bytes: int, available_bytes: int, flag: str) -> None:
    if size_bytes > available_bytes:
        raise ConfigError(f"{flag} asks for {_gib(size_bytes)}, but {_gib(available_bytes)} of memory are available")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
