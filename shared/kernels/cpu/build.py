"""Compiles the C++ kernels once per machine and version, and loads them.

The result lives in the cache folder (`shared/base/cache_dir.py`) under a key of everything that changes it: sources,
flags, torch, Python, compiler and the CPU's instruction set. Workers that start together do not build twice: the first one holds
a file lock, the others wait for it and load what it built. A build that is killed leaves nothing behind that could be loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from shared.base.cache_dir import cache_dir

if TYPE_CHECKING:
    from shared.kernels.cpu.native import Native

log = logging.getLogger(__name__)

_NAME = "twostroke_cpu"
_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-DNDEBUG")
_CAPABILITY_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
    "AVX512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
        *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    ),
}
_GENERIC_FLAGS = ("-DCPU_CAPABILITY=DEFAULT",)  # at::vec's own default: NEON on ARM, plain loops elsewhere


class CannotBuild(ImportError):
    """The CPU kernels cannot be compiled or loaded here; the message says what is missing."""


def load_native() -> Native:
    """The compiled kernels, built first if the cache has none for this machine. Raises CannotBuild."""
    flags = _flags()
    library = _library(flags)
    if not library.exists():
        _build_once(library, flags)
    return _load(library)


def is_built() -> bool:
    """Whether the cache has them. Raises CannotBuild if it could not."""
    return _library(_flags()).exists()


def _library(flags: tuple[str, ...]) -> Path:
    return cache_dir() / f"cpu-{_key(_compiler(), flags)}" / f"{_NAME}.so"


def _compiler() -> str:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise CannotBuild(f"no C++ compiler {compiler!r} on the PATH (install g++, or set CXX)")
    return compiler


def _flags() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    flags = _FLAGS + _CAPABILITY_FLAGS.get(capability, _GENERIC_FLAGS)
    if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported():
        flags += ("-mavx512bf16",)
    return flags + tuple(shlex.split(os.environ.get("CXXFLAGS", "")))


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.cpp"))


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    facts = (version, torch.__version__, sys.version, platform.machine(), *flags)
    digest = hashlib.blake2b("\0".join(facts).encode(), digest_size=10)
    for path in [*_sources(), *sorted(_HERE.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _build_once(library: Path, flags: tuple[str, ...]) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        lock = (library.parent / "lock").open("w")
    except OSError as error:
        raise CannotBuild(f"the cache folder cannot be written: {error} (set TWOSTROKE_CACHE to one that can)") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also by a killed process
        if not library.exists():
            log.info("building CPU kernels (once, about 40 s) in %s", library.parent)
            _build(library, flags)


def _build(library: Path, flags: tuple[str, ...]) -> None:
    from torch.utils import cpp_extension  # slow to import, and needed only here

    # ninja is installed beside the interpreter, which need not be on the PATH of a service
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if not cpp_extension.is_ninja_available():
        raise CannotBuild("the build tool ninja is missing (pip install ninja)")
    folder = library.parent / "build"
    shutil.rmtree(folder, ignore_errors=True)  # what a killed build left
    folder.mkdir()
    try:
        cpp_extension.load(
            _NAME, [str(path) for path in _sources()], extra_cflags=list(flags), build_directory=str(folder), is_python_module=False
        )
    except (RuntimeError, OSError) as error:
        raise CannotBuild(f"compiling failed: {error}") from error
    os.replace(folder / f"{_NAME}.so", library)
    shutil.rmtree(folder)


def _load(library: Path) -> Native:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return cast("Native", module)
