"""`twostroke up`: checks what can be checked, gets the model, starts everything, says when it is ready, and stops it again.

    port free ─> model there ─> Valkey ─> workers and router ─> ready ─> Ctrl-C or SIGTERM ─> stopped

A mistake that the operator can mend is a ConfigError, before or from a child, and ends with one line and exit code 2.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from services.local.config import UpConfig
from services.local.display import Display
from services.local.launch import launch_command
from services.local.stack import Stack
from services.local.supervisor import ChildFailed, Supervisor
from services.local.valkey import ValkeyAddress
from shared.base.address import Address
from shared.base.cache_dir import cache_dir
from shared.base.errors import ConfigError
from shared.models.fetch import default_model_folder, is_fetched
from shared.models.locate import is_local, locate
from shared.options.config import parse_config
from shared.process.listener import listen


def main(argv: Sequence[str]) -> None:
    config = parse_config(UpConfig, argv, "twostroke up", os.environ)
    started_at = time.monotonic()
    config = replace(config, port=_free_port(config.host, config.port))
    config = with_cluster_secret(replace(config, model=_model(config)))
    try:
        asyncio.run(_serve(config, started_at))
    except ChildFailed as error:
        sys.exit(f"error: {error}")


def with_cluster_secret(config: UpConfig) -> UpConfig:
    """A new secret at each start, unless the operator gives one that other machines know too."""
    if config.cluster_secret or config.cluster_secret_file:
        return config
    return replace(config, cluster_secret=secrets.token_urlsafe(32))


def _free_port(host: str, port: int) -> int:
    """`port` if it can be listened on, or for 0 one that can. Raises ConfigError."""
    with listen(host, port) as probe:
        return int(probe.getsockname()[1])


def _model(config: UpConfig) -> str:
    """The path of the model, or a hub id as it is, which is downloaded here: once, and not by every child. Raises ConfigError if
    there is no such model."""
    if not config.model:
        return str(_default_model())
    locate(config.model, config.revision, config.tokenizer)
    return str(Path(config.model).expanduser().absolute()) if is_local(config.model) else config.model


def _default_model() -> Path:
    """Fetches it if need be, in a process of its own: converting takes memory that a supervisor should not keep."""
    if not is_fetched():
        fetch = subprocess.run(
            launch_command((sys.executable, "-m", "shared.models.fetch")), stdout=subprocess.DEVNULL, check=False
        )
        if fetch.returncode != 0:
            sys.exit(fetch.returncode)  # it has said why
    return default_model_folder()


async def _serve(config: UpConfig, started_at: float) -> None:
    """Until a signal, or until a child cannot be started."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    display = Display(sys.stdout)
    supervisor = Supervisor(display)
    with _socket_folder() as socket_folder:
        serving = asyncio.create_task(_start_and_watch(config, supervisor, display, started_at, socket_folder))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()  # if it still runs: nothing more is to be started
        stopping.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)
        await _stop(supervisor, display, is_wanted=stop.is_set())
    if not stop.is_set():
        serving.result()


async def _stop(supervisor: Supervisor, display: Display, is_wanted: bool) -> None:
    if is_wanted:
        display.say("stopping")
    started_at = time.monotonic()
    await supervisor.stop()
    if is_wanted:
        display.say(f"stopped in {time.monotonic() - started_at:.1f} s")


async def _start_and_watch(
    config: UpConfig, supervisor: Supervisor, display: Display, started_at: float, socket_folder: Path
) -> None:
    run_folder = _fresh_run_folder(config.port, display)
    display.say(f"starting {_shape(config)}" + (f"; logs are in {run_folder}" if run_folder else ""))
    stack = Stack(config, run_folder, ValkeyAddress(unix_socket=socket_folder / "valkey.sock"), os.environ)
    if stack.has_valkey:
        await supervisor.start([stack.valkey()])
    await supervisor.start([*stack.workers(), stack.router()])
    display.say(f"ready in {time.monotonic() - started_at:.1f} s: {_url(config)}/v1 ({_shape(config)})")
    display.say(f"\n{_curl(config)}\n\nCtrl-C stops everything.")
    await supervisor.watch()


def _fresh_run_folder(port: int, display: Display) -> Path | None:
    """Where this run's logs go: one folder per HTTP port, emptied at each start. None, and one line, if there cannot be one."""
    folder = cache_dir() / "run" / str(port)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        display.say(f"warning: no logs are kept, since {folder} cannot be made: {error.strerror}")
        return None
    return folder


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """Of this run's own, and gone after it. Raises ConfigError."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="twostroke-")
    except OSError as error:
        raise ConfigError(f"cannot make a folder for sockets; TMPDIR names another place: {error.strerror}") from None
    with folder as path:
        yield Path(path)


def _shape(config: UpConfig) -> str:
    counts = {"prefill": config.num_prefill, "decode": config.num_decode, "colocated": config.colocated}
    return f"{config.model_name}, " + " + ".join(f"{count} {role}" for role, count in counts.items() if count)


def _url(config: UpConfig) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://{Address(host, config.port)}"


def _curl(config: UpConfig) -> str:
    """A request to try. The API key is named, never shown."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": config.model_name, "messages": messages, "temperature": 0}
    key = ' -H "Authorization: Bearer $TWOSTROKE_API_KEY"' if config.api_key else ""
    url, data = f"{_url(config)}/v1/chat/completions", shlex.quote(json.dumps(body))
    return f"curl {url} -H 'Content-Type: application/json'{key} \\\n  -d {data}"


if __name__ == "__main__":
    main(sys.argv[1:])
