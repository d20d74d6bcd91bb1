"""The generated code in shared/rpc is what the files in proto/ give today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_generated_code_is_fresh(tmp_path):
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    protos = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "proto").glob("*.proto"))]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "shared/rpc=proto", *out, *protos]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    generated = {path.name: path.read_text() for path in (tmp_path / "shared" / "rpc").iterdir()}
    checked_in = {path.name: path.read_text() for path in (ROOT / "shared" / "rpc").glob("*_pb2*")}
    assert len(generated) == 3 * len(protos)
    assert checked_in == generated, "run `make proto`"
