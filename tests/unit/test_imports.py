"""Who may import whom. The rules are read off the source; torch's absence from the router is also tried."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("router", "prefill", "decode", "local")
LAYERS = (  # each may import those after it
    "services",
    "shared.worker",
    "shared.transfer.handoff",
    "shared.transfer.transports",
    "shared.engine",
    "shared.models",
    "shared.kernels",
    "shared.index",
    "shared.wire",
    "shared.process",
    "shared.options",
    "shared.base",
)
ENGINE_ROOMS = ("shared.engine.compute", "shared.engine.memory", "shared.engine.schedule")  # likewise, inside the engine
ROUTER_ROOMS = ("services.router.http", "services.router.dispatch", "services.router.text")
TORCH_FREE = (
    "services.router",
    "services.local",
    "shared.base",
    "shared.options",
    "shared.wire",
    "shared.process",
    "shared.index",
    "shared.rpc",
    "shared.engine.schedule",
    "shared.models.locate",
    "shared.models.tokenizer",
    "shared.models.fetch",
)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether always (True) or only when some function runs (False)."""
    return list(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(path.read_text())
    lazy = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(f)}
    typing_only = {id(node) for block in ast.walk(tree) if _is_type_checking(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module, id(node) not in lazy
            yield from ((f"{node.module}.{alias.name}", id(node) not in lazy) for alias in node.names)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


SOURCES = {module_of(path): path for package in ("services", "shared") for path in sorted((ROOT / package).rglob("*.py"))}
EDGES = [(module, target) for module, path in SOURCES.items() for target, _ in imports_of(path)]


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer_of(module: str, layers: tuple[str, ...]) -> int | None:
    return next((i for i, layer in enumerate(layers) if is_in(module, layer)), None)


def service_of(module: str) -> str | None:
    first, *rest = module.split(".")
    return rest[0] if first == "services" and rest and rest[0] in SERVICES else None


def test_the_sources_are_found():
    assert {"services.cli", "shared.options.config", "shared.engine.engine"} <= SOURCES.keys()


def test_every_module_of_shared_lies_in_a_room():
    rooms = (*LAYERS, "shared.transfer", "shared.rpc")
    assert [
        module for module in SOURCES if is_in(module, "shared") and module != "shared" and layer_of(module, rooms) is None
    ] == []


@pytest.mark.parametrize("layers", [LAYERS, ENGINE_ROOMS, ROUTER_ROOMS], ids=["all", "engine", "router"])
def test_layers_import_downwards_only(layers):
    numbered = [(module, target, layer_of(module, layers), layer_of(target, layers)) for module, target in EDGES]
    assert [f"{m} -> {t}" for m, t, upper, lower in numbered if upper is not None and lower is not None and lower < upper] == []


def test_what_chooses_workers_knows_nothing_of_text():
    dispatch, text = ROUTER_ROOMS[1:]
    assert [f"{m} -> {t}" for m, t in EDGES if is_in(m, dispatch) and is_in(t, text)] == []


def test_shared_never_imports_services():
    assert [f"{m} -> {t}" for m, t in EDGES if m.startswith("shared") and t.split(".")[0] == "services"] == []


def test_services_never_import_each_other():
    pairs = [(module, target, service_of(module), service_of(target)) for module, target in EDGES]
    assert [f"{m} -> {t}" for m, t, own, other in pairs if own and other and own != other] == []


def test_nothing_imports_tests():
    assert [f"{m} -> {t}" for m, t in EDGES if t.split(".")[0] == "tests"] == []


def test_every_folder_of_code_is_a_package_and_proto_is_not():
    folders = {path.parent for path in SOURCES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    assert not (ROOT / "proto" / "__init__.py").exists()


@pytest.mark.parametrize("package", TORCH_FREE)
def test_a_torch_free_room_imports_no_torch_however_indirectly(package):
    seen, todo = {}, [(module, package) for module in SOURCES if is_in(module, package)]
    while todo:
        module, importer = todo.pop()
        if module in SOURCES and module not in seen:
            seen[module] = importer
            todo += [(target, module) for target, always in imports_of(SOURCES[module]) if always]
            todo += [(module.rpartition(".")[0], module)]  # importing a module imports its package first
        assert module.split(".")[0] not in ("torch", "triton", "accelerate"), f"{importer} imports {module}"


def test_torch_free_rooms_work_with_torch_absent():
    """Imports every module of them in a process in which torch cannot be found."""
    modules = sorted(module for module in SOURCES if layer_of(module, TORCH_FREE) is not None)
    script = (
        "import importlib, importlib.abc, sys\n"
        "class Blocker(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'triton'):\n"
        "            raise ModuleNotFoundError(f'{name} is blocked', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
