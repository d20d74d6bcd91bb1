"""The engines of a comparison: how each is started so that all do the same work with the same means.

Every engine gets the same weights in the same type, the same cores, room for 32 running sequences and 8,192 tokens in each, and
what else its makers advise for a CPU. An engine that is not part of this project is used if a variable says where it is.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare.config import CompareConfig
from shared.base.errors import ConfigError

ROOT = Path(__file__).parents[2]
_MAX_MODEL_LEN, _MAX_NUM_SEQS, _KV_CACHE_GIB = 8192, 32, 4
# llama.cpp divides its context evenly among its sequences; this gives each a share of the 4 GiB.
_LLAMA_CONTEXT = 139_264


@dataclass(frozen=True, slots=True)
class Engine:
    """`ready_path` answers 200 when a request would succeed. `environ` is the whole environment."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    ready_path: str = "/health"
    is_ours: bool = False
    is_serial: bool = False  # one request at a time, the others wait


@dataclass(frozen=True, slots=True)
class Missing:
    """An engine that is not on this machine, and what to set if it is."""

    name: str
    variables: str


def engines_at(config: CompareConfig, port: int) -> list[Engine | Missing]:
    """All that there are, ours first. Raises ConfigError for a path that does not exist."""
    return [
        _twostroke("twostroke-colocated", config, port, "--colocated", "1"),
        _twostroke("twostroke-disaggregated", config, port, "--prefill", "1", "--decode", "1"),
        _vllm(config, port),
        _openvino(config, port),
        _llama(config, port),
        _transformers(config, port),
    ]


def _twostroke(name: str, config: CompareConfig, port: int, *shape: str) -> Engine:
    command = (sys.executable, "-m", "services.cli", "up", "--model", config.model, "--port", str(port), *shape)
    limits = ("--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(_MAX_NUM_SEQS))
    means = ("--dtype", config.dtype, "--kv-cache-memory", f"{_KV_CACHE_GIB}GiB")
    return Engine(name, (*command, *limits, *means), _environ(PYTHONPATH=str(ROOT)), "/ready", is_ours=True)


def _vllm(config: CompareConfig, port: int) -> Engine | Missing:
    if not config.bench_vllm_python:
        return Missing("vllm", "TWOSTROKE_BENCH_VLLM_PYTHON")
    python = _existing("TWOSTROKE_BENCH_VLLM_PYTHON", config.bench_vllm_python)
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model, "--served-model-name", "model")
    limits = ("--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(_MAX_NUM_SEQS), "--dtype", config.dtype)
    environ = _environ(
        LD_PRELOAD=":".join(_vllm_preloads(Path(python))),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{_num_cores() - 1}",  # by default it leaves a core out
        VLLM_CPU_KVCACHE_SPACE=str(_KV_CACHE_GIB),
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_ENGINE_READY_TIMEOUT_S="1200",  # on few cores it compiles the model for ten minutes
    )
    return Engine("vllm", (*command, *limits, "--host", "127.0.0.1", "--port", str(port)), environ)


def _vllm_preloads(python: Path) -> list[str]:
    """The allocator and OpenMP that its documentation advises, as far as they are installed; a third of its speed."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return [*filter(None, [ctypes.util.find_library("tcmalloc_minimal")]), *([str(openmp)] if openmp.exists() else [])]


def _openvino(config: CompareConfig, port: int) -> Engine | Missing:
    if not config.bench_openvino_python or not config.bench_openvino_model:
        return Missing("openvino", "TWOSTROKE_BENCH_OPENVINO_PYTHON and TWOSTROKE_BENCH_OPENVINO_MODEL")
    python = _existing("TWOSTROKE_BENCH_OPENVINO_PYTHON", config.bench_openvino_python)
    model = _existing("TWOSTROKE_BENCH_OPENVINO_MODEL", config.bench_openvino_model)
    command = (python, "-m", "bench.compare.peers.openvino_server", "--model", model, "--port", str(port), "--dtype", config.dtype)
    means = ("--num-threads", str(_num_cores()), "--max-num-seqs", str(_MAX_NUM_SEQS), "--kv-cache-gib", str(_KV_CACHE_GIB))
    return Engine("openvino", (*command, *means), _environ(PYTHONPATH=str(ROOT)))


def _llama(config: CompareConfig, port: int) -> Engine | Missing:
    if not config.bench_llama_server or not config.bench_llama_model:
        return Missing("llama.cpp", "TWOSTROKE_BENCH_LLAMA_SERVER and TWOSTROKE_BENCH_LLAMA_MODEL")
    server = _existing("TWOSTROKE_BENCH_LLAMA_SERVER", config.bench_llama_server)
    model = _existing("TWOSTROKE_BENCH_LLAMA_MODEL", config.bench_llama_model)
    threads = ("-t", str(_num_cores()), "-tb", str(_num_cores()))
    limits = ("-np", str(_MAX_NUM_SEQS), "-c", str(_LLAMA_CONTEXT))
    return Engine("llama.cpp", (server, "-m", model, *threads, *limits, "--host", "127.0.0.1", "--port", str(port)), _environ())


def _transformers(config: CompareConfig, port: int) -> Engine:
    command = (sys.executable, "-m", "bench.compare.peers.transformers_server", "--model", config.model, "--dtype", config.dtype)
    means = ("--port", str(port), "--num-threads", str(_num_cores()))
    return Engine("transformers", (*command, *means), _environ(PYTHONPATH=str(ROOT)), is_serial=True)


def _environ(**own: str) -> dict[str, str]:
    """This process's environment, less the options that are meant for it, and no model hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTROKE_") or name == "TWOSTROKE_CACHE"}
    return kept | {"HF_HUB_OFFLINE": "1"} | own


def _existing(variable: str, path: str) -> str:
    """Absolute, but not resolved: the Python of a virtual environment is a link, and knows where it is by that."""
    if not Path(path).exists():
        raise ConfigError(f"{variable} is {path!r}, and there is no such file or folder")
    return str(Path(path).absolute())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
