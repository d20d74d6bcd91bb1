"""A copy of the project in which mutmut may work: it reads its options from pyproject.toml and keeps its state in the folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.groups import Group

ROOT = Path(__file__).parents[2]

# A message to people may say anything; what is raised, returned or counted may not.
_NOT_MUTATED = (r"^\s*log\.\w+\(", r"^\s*assert .*, ")


def make_workspace(folder: Path, group: Group) -> None:
    """Fills `folder` with the files that git knows, as they are now, and mutmut's options for this group."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in _files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    tests = sorted({str(path.relative_to(folder)) for pattern in group.tests for path in folder.glob(pattern)})
    options = {
        "source_paths": ["shared", "services"],
        "only_mutate": list(group.modules),
        "also_copy": ["bench", "proto"],
        "do_not_mutate_patterns": list(_NOT_MUTATED),
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": tests,
        "process_isolation": "forkserver",  # grpc and torch have threads, which do not survive a fork
        # A mutant may take (the time of its tests + 4 s) * 5, then it counts as noticed: one that loops costs half a minute.
        "timeout_constant": 4.0,
        "timeout_multiplier": 5.0,
    }
    with (folder / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items()))


def run_mutmut(folder: Path, num_processes: int) -> int:
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(num_processes)]
    with (folder / "mutmut.log").open("w") as output:
        return subprocess.run(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def _files() -> Iterator[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    return (name for name in listed.stdout.splitlines() if (ROOT / name).is_file())
