"""The command line as its user meets it: what it prints where, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.cli import main
from services.local.__main__ import _curl, _fresh_run_folder, _socket_folder, _url, with_cluster_secret
from services.local.config import UpConfig
from services.local.display import Display
from services.local.stack import Stack
from services.local.valkey import ValkeyAddress
from shared.base.errors import ConfigError
from shared.base.version import VERSION
from shared.options.config import parse_config
from shared.options.worker import WorkerConfig


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TWOSTROKE_")]:
        monkeypatch.delenv(name)


def exit_code(*argv: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code


def test_help_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "services.cli", "--help"], capture_output=True, text=True, check=True)
    for command in ("up", "router", "prefill", "decode", "bench"):
        assert f"  {command} " in done.stdout


def test_version_is_the_packages(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"twostroke {VERSION}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("fly",), ["'fly'", "up, router, prefill, decode, bench"]),
        (("up", "--prefill", "some"), ["--prefill", "'some'", "whole number"]),
        (("up", "--port", "0", "--model", "/no/such/folder"), ["--model", "/no/such/folder"]),
        (("up", "--port", "0", "--model", "tests"), ["--model", "/tests", "no weights"]),
        (("up", "--host", "192.0.2.1", "--model", "."), ["192.0.2.1"]),  # an address of documentation, never this machine's
    ],
)
def test_a_users_mistake_is_one_line_on_stderr_and_exit_code_2(argv, words, capsys):
    assert exit_code(*argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("error: ")
    assert [word for word in words if word not in shown.err] == []


def test_a_port_in_use_is_said_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = [sys.executable, "-m", "services.cli", "up", "--port", str(port)]
        done = subprocess.run(up, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{port}: the port is in use; choose another with --port\n"
    assert done.stdout == ""


def test_a_variable_is_as_good_as_a_flag_and_named_when_wrong(capsys, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_MAX_NUM_SEQS", "lots")
    assert exit_code("up") == 2
    assert "TWOSTROKE_MAX_NUM_SEQS" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["router", "decode"])
def test_a_services_own_mistakes_end_the_same_way(command):
    """In a process of its own: the router forbids its process to import torch."""
    service = [sys.executable, "-m", "services.cli", command, "--port", "x"]
    done = subprocess.run(service, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: twostroke {command}: ")
    assert done.stderr.count("\n") == 1


def stack(tmp_path: Path, *argv: str, **environ: str) -> Stack:
    config = parse_config(UpConfig, ["--model", "/models/m", *argv], "twostroke up", environ)
    return Stack(config, tmp_path, ValkeyAddress(unix_socket=tmp_path / "socket"), environ)


def test_workers_get_their_options_and_nothing_that_was_meant_for_up(tmp_path):
    inherited = {"TWOSTROKE_PORT": "9000", "TWOSTROKE_HOST": "0.0.0.0", "TWOSTROKE_CACHE": "/cache", "CUDA_VISIBLE_DEVICES": ""}
    workers = stack(tmp_path, "--prefill", "2", "--metrics-port", "9100", **inherited).workers()
    assert [worker.name for worker in workers] == ["prefill-0", "prefill-1", "decode-0"]
    for index, worker in enumerate(workers):
        config = parse_config(WorkerConfig, [], "prog", worker.environ)
        assert (config.worker_id, config.model, config.port, config.host) == (worker.name, "/models/m", 0, "127.0.0.1")
        assert config.redis_url == f"unix://{tmp_path}/socket"
        assert config.metrics_port == 9100 + index
        assert worker.environ["TWOSTROKE_CACHE"] == "/cache"


def test_secrets_travel_in_the_environment_only(tmp_path):
    children = stack(tmp_path, "--api-key", "sesame", "--redis-url", "redis://:sesame@host/0")
    specs = [*children.workers(), children.router()]
    assert not children.has_valkey
    assert children.router().environ["TWOSTROKE_API_KEY"] == "sesame"
    assert not any("sesame" in repr(spec) for spec in specs)


def test_colocated_workers_are_decode_workers_told_to_prefill(tmp_path):
    (worker,) = stack(tmp_path, "--colocated", "1", TWOSTROKE_COLOCATED="1").workers()
    assert (worker.name, worker.command[-1], worker.environ["TWOSTROKE_COLOCATED"]) == ("colocated-0", "decode", "true")


def test_workers_on_one_gpu_share_its_memory(tmp_path):
    workers = stack(tmp_path, "--gpu-memory-utilization", "0.8", CUDA_VISIBLE_DEVICES="3").workers()
    shares = [parse_config(WorkerConfig, [], "prog", worker.environ).gpu_memory_utilization for worker in workers]
    assert shares == [0.4, 0.4]
    assert {worker.environ["CUDA_VISIBLE_DEVICES"] for worker in workers} == {"3"}


class Screen:
    """A stream that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self.is_terminal


def show(is_terminal: bool) -> str:
    screen = Screen(is_terminal)
    display = Display(screen)  # type: ignore[arg-type]
    display.progress("decode-0", "loading")
    display.printed("decode-0", "2026-11-29 16:00:00,123 INFO    decode-0 all is well")
    display.printed("decode-0", "2026-11-29 16:00:00,123 WARNING decode-0 slow disk")
    display.ready("decode-0", 1.26)
    return screen.text


def test_a_file_gets_plain_lines_and_only_severe_records():
    assert show(is_terminal=False).splitlines() == [
        "  decode-0    loading",
        "  decode-0    warning: slow disk",
        "  decode-0    ready after 1.3 s",
    ]


def test_a_terminal_gets_a_status_line_that_is_rewritten():
    shown = show(is_terminal=True)
    assert "\r\x1b[K  decode-0: loading\r\x1b[K  decode-0    warning: slow disk\n" in shown
    assert shown.endswith("  decode-0    ready after 1.3 s\n")


def test_a_screen_that_takes_nothing_more_stops_nobody():
    with open("/dev/full", "w") as screen:
        display = Display(screen)
        display.progress("decode-0", "loading")
        display.trouble("decode-0", "slow")
        display.say("x" * 100_000)
        with contextlib.suppress(OSError):  # what is left in the buffer
            screen.flush()
        with pytest.raises(OSError, match="No space left"):
            screen.close()


def test_without_room_for_logs_one_line_says_so_and_none_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TWOSTROKE_CACHE", "/dev/full/cache")
    screen = Screen(is_terminal=False)
    assert _fresh_run_folder(8000, Display(screen)) is None  # type: ignore[arg-type]
    assert screen.text == "warning: no logs are kept, since /dev/full/cache/run/8000 cannot be made: Not a directory\n"
    config = parse_config(UpConfig, ["--model", "/models/m"], "twostroke up", {})
    assert Stack(config, None, ValkeyAddress(unix_socket=tmp_path / "socket"), {}).router().log_path is None


def test_logs_of_an_earlier_run_are_gone_and_others_may_not_read_them(monkeypatch, tmp_path):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    old = tmp_path / "run" / "8000" / "router.log"
    old.parent.mkdir(parents=True)
    old.touch()
    screen = Screen(is_terminal=False)
    folder = _fresh_run_folder(8000, Display(screen))  # type: ignore[arg-type]
    assert folder == old.parent
    assert (list(folder.iterdir()), folder.stat().st_mode & 0o777, screen.text) == ([], 0o700, "")


def test_without_room_for_sockets_there_is_one_line(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/full")
    with pytest.raises(ConfigError, match=r"sockets; TMPDIR names another place: Not a directory"), _socket_folder():
        pass


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_the_url_that_is_shown_can_be_used(host, url):
    assert _url(UpConfig(host=host, port=80)) == url


def test_every_start_makes_a_secret_unless_one_is_given(monkeypatch):
    made = [with_cluster_secret(UpConfig()).cluster_secret for _ in range(2)]
    assert all(len(secret) >= 32 for secret in made)
    assert made[0] != made[1]
    given = UpConfig(cluster_secret="given by the operator")
    assert with_cluster_secret(given) == given
    by_file = UpConfig(cluster_secret_file="/run/secrets/cluster")
    assert with_cluster_secret(by_file) == by_file


def test_every_process_of_a_stack_gets_its_secret_and_tls_and_valkey_gets_none(tmp_path):
    given = {"TWOSTROKE_CLUSTER_SECRET": "open sesame, please"}
    tls = {f"TWOSTROKE_TLS_{name}": f"/{name}" for name in ("CERT", "KEY", "CA")}
    children = stack(tmp_path, **given, **tls)
    for spec in (*children.workers(), children.router()):
        assert given.items() | tls.items() <= spec.environ.items()
        assert not any("sesame" in word for word in (repr(spec), *spec.command))
    assert "sesame" not in str(children.valkey().environ)
    (worker, _) = stack(tmp_path, "--cluster-secret-file", "/run/secrets/cluster").workers()
    assert worker.environ["TWOSTROKE_CLUSTER_SECRET_FILE"] == "/run/secrets/cluster"


def test_the_request_to_try_is_valid_and_shows_no_key():
    curl = _curl(UpConfig(model="/models/it's m", api_key="sesame", host="0.0.0.0"))
    assert "sesame" not in curl
    arguments = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {curl}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert arguments[1] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(arguments[-1])["model"] == "it's m"
