"""Which processes make up Twostroke on one machine, and what each is told.

    stop stage 0   router            takes requests
               1   workers           prefill-0 …, decode-0 …, colocated-0 …
               2   valkey            unless --redis-url names another

Options travel in environment variables, so that no secret stands in the process list. A worker listens on a port of the system's
choice and registers it, so that a restarted one needs no port to be free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from services.local.child import ChildSpec
from services.local.config import UpConfig
from services.local.placement import Placement, place, usable_gpus
from services.local.valkey import READY_TEXT, ValkeyAddress, valkey_command
from shared.options.config import to_environ
from shared.options.peers import PeerConfig
from shared.process.cpus import num_usable_cpus, usable_cpus


@dataclass(frozen=True, slots=True)
class Stack:
    """Makes the specs of all children from `config`, whose model and port are real ones by now."""

    config: UpConfig
    run_folder: Path | None  # where logs go; None: nowhere
    valkey_address: ValkeyAddress  # of the embedded one, if the configuration names no other
    environ: Mapping[str, str] = field(repr=False)  # of the supervisor

    @property
    def has_valkey(self) -> bool:
        return not self.config.redis_url

    @property
    def redis_url(self) -> str:
        return self.config.redis_url or self.valkey_address.url

    def valkey(self) -> ChildSpec:
        return self._spec("valkey", valkey_command(self.valkey_address), self._inherited(), ready_text=READY_TEXT, stop_stage=2)

    def workers(self) -> list[ChildSpec]:
        config = self.config
        names = [f"prefill-{i}" for i in range(config.num_prefill)]
        names += [f"decode-{i}" for i in range(config.num_decode)]
        names += [f"colocated-{i}" for i in range(config.colocated)]
        places = place(len(names), usable_cpus(), num_usable_cpus(), usable_gpus(config.device, self.environ))
        return [self._worker(name, index, at) for index, (name, at) in enumerate(zip(names, places, strict=True))]

    def router(self) -> ChildSpec:
        config = self.config
        options = to_environ(PeerConfig(**{option.name: getattr(config, option.name) for option in fields(PeerConfig)}))
        options |= {"TWOSTROKE_HOST": config.host, "TWOSTROKE_PORT": str(config.port), "TWOSTROKE_MODEL": config.model}
        options |= {"TWOSTROKE_SERVED_MODEL_NAME": config.model_name, "TWOSTROKE_REVISION": config.revision}
        options |= {"TWOSTROKE_TOKENIZER": config.tokenizer}
        options |= {"TWOSTROKE_API_KEY": config.api_key, "TWOSTROKE_REDIS_URL": self.redis_url}
        options |= {"TWOSTROKE_HANDOFF": config.handoff, "TWOSTROKE_LOG_LEVEL": config.log_level}
        options |= {"TWOSTROKE_DRAIN_TIMEOUT_S": str(config.drain_timeout_s)}
        return self._spec("router", _service("router"), self._inherited() | options)

    def _worker(self, name: str, index: int, at: Placement) -> ChildSpec:
        config = self.config
        role = name.rpartition("-")[0]
        worker = config.worker(
            worker_id=name,
            redis_url=self.redis_url,
            num_threads=config.num_threads or at.num_threads,
            gpu_memory_utilization=config.gpu_memory_utilization / at.num_on_gpu,
            metrics_port=None if config.metrics_port is None else config.metrics_port + index,
        )
        environ = self._inherited() | to_environ(worker)
        if at.gpu:
            environ["CUDA_VISIBLE_DEVICES"] = at.gpu
        if role == "colocated":
            role, environ["TWOSTROKE_COLOCATED"] = "decode", "true"
        return self._spec(name, _service(role), environ, cpus=at.cpus, stop_stage=1)

    def _inherited(self) -> dict[str, str]:
        """The supervisor's environment without its own options, which mean something else to a child, and with the programs of
        this virtual environment, such as the build tool that the CPU kernels need."""
        own = {f"TWOSTROKE_{option.name.upper()}" for option in fields(UpConfig)}
        environ = {name: value for name, value in self.environ.items() if name not in own}
        return environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])}

    def _spec(
        self,
        name: str,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        *,
        cpus: tuple[int, ...] = (),
        ready_text: str = "",
        stop_stage: int = 0,
    ) -> ChildSpec:
        log_path = self.run_folder / f"{name}.log" if self.run_folder else None
        return ChildSpec(name, command, environ, log_path, cpus, ready_text, stop_stage)


def _service(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "services.cli", name)
