"""The whole product as a user runs it: `twostroke up` in a process of its own, watched through its terminal output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil

from shared.base.address import Address

READY_TIMEOUT_S = 150.0


class Stack:
    def __init__(self, host: str, port: int, process: subprocess.Popen[str]) -> None:
        self.port = port
        self.url = f"http://{Address(host, port)}"
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip())

    def wait_ready(self) -> None:
        """Until a request would succeed; fails with what the stack said."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("not ready:\n" + "\n".join(self.lines))

    def pid_of(self, name: str) -> int:
        """Of a child by its name in the stack: router, valkey, prefill-0, …"""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            environ = child.environ()
            command = " ".join(child.cmdline())
            if environ.get("TWOSTROKE_WORKER_ID") == name or (name in ("router", "valkey") and name in command):
                return child.pid
        raise AssertionError(f"no process {name}")

    def has_another(self, name: str, old_pid: int) -> bool:
        """Whether the child was started again."""
        try:
            return self.pid_of(name) != old_pid
        except (AssertionError, psutil.NoSuchProcess):
            return False

    def stop(self) -> float:
        """Ctrl-C; seconds until it has ended."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=20)
        return time.monotonic() - begin


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def stack(model: Path, *flags: str, host: str = "127.0.0.1", output: int | IO[str] = subprocess.PIPE) -> Iterator[Stack]:
    port = free_port()
    listens = ("--host", host, "--port", str(port))
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "up", "--model", str(model), *listens, *flags],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    made = Stack(host, port, process)
    try:
        made.wait_ready()
        yield made
    finally:
        if process.poll() is None:
            made.stop()
        process.stdout.close() if process.stdout else None
