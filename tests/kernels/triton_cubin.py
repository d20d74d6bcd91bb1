"""Compiles launches for a device that is not here, and reads what came out with the tools that Triton bundles."""

from __future__ import annotations

import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton

from shared.kernels.triton.aot import all_launches, compile_launch

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
NUM_PROCESSES = 2


@dataclass(frozen=True)
class Cubin:
    name: str
    capability: int
    num_registers: int
    stack_bytes: int  # spilled registers live there
    shared_bytes: int
    sass: str  # empty unless asked for

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability}): {self.num_registers} registers, {self.stack_bytes} bytes of stack"


def compile_all(names: list[str], capability: int, want_sass: set[str]) -> list[Cubin]:
    """The launches of `all_launches` with these names, in parallel processes."""
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_compile, names, [capability] * len(names), [name in want_sass for name in names]))


def _compile(name: str, capability: int, want_sass: bool) -> Cubin:
    (launch,) = [n.launch for n in all_launches(capability) if n.name == name]
    compiled = compile_launch(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("--dump-sass", file.name) if want_sass else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Cubin(name, capability, int(found[1]), int(found[2]), compiled.metadata.shared, sass)


def _cuobjdump(option: str, path: str) -> str:
    return subprocess.run([CUOBJDUMP, option, path], check=True, capture_output=True, text=True).stdout
