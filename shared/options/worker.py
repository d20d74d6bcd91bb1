"""The options of a worker process, the same for every role. Torch-free, so that supervisors can parse and hand them on."""

from __future__ import annotations

from dataclasses import dataclass

from shared.options.checks import check_advertised, check_at_least, check_listener, check_port, check_served_name, served_name
from shared.options.config import option, size_bytes
from shared.options.peers import PeerConfig


@dataclass(frozen=True, slots=True)
class WorkerConfig(PeerConfig):
    """A Twostroke worker: one engine with a gRPC server in front."""

    model: str = option("", "folder with a model, .gguf file or hub id")
    served_model_name: str = option("", "name clients use; default: the last part of --model")
    revision: str = option("", "hub revision of --model")
    dtype: str = option("auto", "compute type", choices=("auto", "bfloat16", "float16", "float32"))
    kv_cache_dtype: str = option(
        "auto",
        "type of stored keys and values; auto: the compute type. int8 and fp8 take about half of bfloat16's memory",
        choices=("auto", "fp8", "fp8_e4m3", "int8"),
    )
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    kernels: str = option("auto", "kernel backend to use", choices=("auto", "reference", "cpu", "triton"))
    max_model_len: int | None = option(None, "longest sequence, prompt plus output; default: the model's own limit")
    max_num_seqs: int = option(32, "most sequences in one step")
    max_num_batched_tokens: int | None = option(None, "most tokens in one step; default: prefill 2048, others 512, on a CPU 256")
    enforce_eager: bool = option(False, "launch a GPU's kernels one by one instead of whole decode steps as CUDA graphs")
    block_size: int = option(16, "tokens per KV block", choices=None)
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory to use in all")
    kv_cache_memory: int | None = option(None, "KV pool on a CPU, such as 4GiB; default: a share of free memory", parse=size_bytes)
    num_blocks: int | None = option(None, "KV blocks; overrides what memory would allow")
    enable_prefix_caching: bool = option(True, "reuse KV blocks of earlier requests with the same prefix")
    num_threads: int | None = option(
        None, "compute threads on a CPU; default: the cores this process may use, or what a container's CPU quota is worth"
    )
    host: str = option("127.0.0.1", "address to listen on, IPv4 or IPv6; 0.0.0.0 or ::, all of this machine's")
    port: int = option(0, "gRPC port; 0 picks a free one")
    advertise: str = option(
        "",
        "host:port that others reach this worker at; default: the port at --host, or at this machine's own address",
    )
    worker_id: str = option("", "stable name of this worker, unlike all others'; default: role and address")
    redis_url: str = option("redis://127.0.0.1:6379/0", "Redis or Valkey with registry and prefix index", secret=True)
    metrics_port: int | None = option(None, "serve /metrics on this port; default: off")
    transport: str = option(
        "auto",
        "how KV blocks travel between workers; auto: as both can best",
        choices=("auto", "cuda-ipc", "shm", "nccl", "gloo", "grpc"),
    )
    transfer_timeout_s: float = option(30.0, "longest wait for one step of a KV transfer: room, chunk or acknowledgement")
    drain_timeout_s: float = option(30.0, "after SIGTERM, how long running sequences may go on")
    log_level: str = option("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        super(WorkerConfig, self).__post_init__()  # slots=True makes a new class: zero-argument super() would miss it
        check_at_least(1, self, "max_num_seqs", "max_num_batched_tokens", "num_blocks", "num_threads", "max_model_len")
        check_listener(self.host, self.port)
        check_port(self.metrics_port, "--metrics-port")
        if self.model:
            check_served_name(self.model_name)
        check_advertised(self.advertise)
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"--block-size is {self.block_size}; it must be one of 8, 16, 32, 64, 128")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1")
        if self.transfer_timeout_s <= 0 or self.drain_timeout_s < 0:
            raise ValueError("--transfer-timeout-s and --drain-timeout-s must be positive")

    @property
    def model_name(self) -> str:
        return served_name(self.model, self.served_model_name)
