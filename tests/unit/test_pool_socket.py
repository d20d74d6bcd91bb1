"""The folder and socket where a pool is handed out: what dead processes left is removed, and nobody else can hinder the start."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from shared.transfer.transports.mapped.socket import listen_privately, pack_writer_id, unpack_writer_id


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def abandoned() -> Path:
    """What a killed process leaves: the kernel closes its socket and removes no file."""
    listener, path = listen_privately()
    listener.close()
    return path.parent


def test_what_a_dead_process_left_is_removed_and_what_a_live_one_uses_is_not(folder: Path) -> None:
    live, path = listen_privately()
    dead = abandoned()
    again, other = listen_privately()
    assert not dead.exists()
    assert {entry.name for entry in folder.iterdir()} == {path.parent.name, other.parent.name}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    live.close()
    again.close()


def test_a_socket_with_a_full_backlog_neither_holds_the_start_nor_counts_as_dead(folder: Path) -> None:
    stopped = folder / "twostroke-shm-stopped"
    stopped.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(stopped / "pool"))
        listener.listen(0)
        waiting = []
        with suppress(BlockingIOError):  # until it is full
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(stopped / "pool"))
        ours, _ = listen_privately()  # would wait for ever
        assert stopped.exists()
        for one in (*waiting, ours):
            one.close()


def test_what_belongs_to_another_user_or_is_no_folder_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = abandoned()
    (folder / "twostroke-shm-file").write_text("")
    (folder / "twostroke-shm-link").symlink_to(dead)
    own_id = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own_id + 1)
    listener, _ = listen_privately()
    listener.close()
    assert dead.exists()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    listener, last = listen_privately()
    listener.close()
    assert {entry.name for entry in folder.iterdir()} == {"twostroke-shm-file", "twostroke-shm-link", last.parent.name}


def test_a_message_that_is_not_a_writers_id_is_refused() -> None:
    assert unpack_writer_id(pack_writer_id(2**64 - 1)) == 2**64 - 1
    for message in (b"", bytes(7), bytes(9)):
        with pytest.raises(ValueError, match="bytes are not a writer_id"):
            unpack_writer_id(message)
