"""Options of `twostroke bench compare`."""

from __future__ import annotations

from dataclasses import dataclass

from bench.load.config import WorkConfig
from shared.options.config import option

OURS = ("twostroke-colocated", "twostroke-disaggregated")
PEERS = ("vllm", "openvino", "llama.cpp", "transformers")


def engine_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not set(names) <= {*OURS, *PEERS}:
        raise ValueError(f"it must list some of {', '.join((*OURS, *PEERS))}, separated by commas")
    return names


@dataclass(frozen=True, slots=True)
class CompareConfig(WorkConfig):
    """Starts one engine after another on this machine, gives each the same work, and sets the results side by side."""

    repeat: int = option(3, "runs of each workload; medians are shown")
    engines: tuple[str, ...] | None = option(None, "comma-separated list; default: all that are installed", parse=engine_names)
    model: str = option("", "folder with the model; default: SmolLM2-135M-Instruct, fetched once")
    dtype: str = option("bfloat16", "compute type of all engines", choices=("bfloat16", "float32"))
    json: str = option("", "file to write the results to; default: a new one in bench/reports/")
    bench_vllm_python: str = option("", "Python of an environment with vLLM for CPUs")
    bench_openvino_python: str = option("", "Python of an environment with OpenVINO GenAI")
    bench_openvino_model: str = option("", "folder with the model as optimum-cli exports it for OpenVINO")
    bench_llama_server: str = option("", "llama.cpp's llama-server")
    bench_llama_model: str = option("", "the model as a GGUF file")
