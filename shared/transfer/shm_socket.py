"""The unix socket between a sender and a receiver of one host: who is at the other end, and what is said over it.

    receiver -> sender   Hello, with the pool's memfd: once
    receiver -> sender   ticket: end this attempt
    sender -> receiver   ticket: ended, nothing more will be written for it

Messages keep their boundaries (SOCK_SEQPACKET). The kernel closes the socket of a process that is dead, and not before none of its
threads can run: the end of the stream proves that the sender writes no more.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

_HELLO = struct.Struct("<8s16s16sQ")
_MAGIC = b"2stroke1"
_TICKET = struct.Struct("<Q")
_UCRED = struct.Struct("3i")  # pid, uid, gid
_FOLDER_PREFIX = "twostroke-shm-"
_SOCKET_NAME = "pool"
MAX_MESSAGE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Hello:
    """`boot_id` is the receiver's; `link_id` is what the sender names this connection by in `Open`."""

    boot_id: str
    link_id: bytes
    size_bytes: int


def machine_id() -> str:
    """The same for all processes under one running kernel, in whatever container; empty where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def listen_privately() -> tuple[socket.socket, Path]:
    """A listening socket, and its path in a new folder that only this user can enter. Removes what dead processes left behind."""
    _remove_dead_folders()
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    listener.bind(str(folder / "new"))
    listener.listen()
    # Only now under its name: whoever finds it there and is refused knows that its process is dead.
    path = (folder / "new").rename(folder / _SOCKET_NAME)
    return listener, path


def _remove_dead_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(folder / _SOCKET_NAME))
            except ConnectionRefusedError:
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                continue  # not ours to enter, or just being made


def is_same_user(connection: socket.socket) -> bool:
    """The pool is as open to whoever maps it as this process's own memory, so only this user may."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(raw)[1] == os.geteuid())


def send_hello(connection: socket.socket, hello: Hello, fd: int) -> None:
    message = _HELLO.pack(_MAGIC, hello.boot_id.encode(), hello.link_id, hello.size_bytes)
    socket.send_fds(connection, [message], [fd])


def receive_hello(connection: socket.socket) -> tuple[Hello, int]:
    """The receiver's greeting and a descriptor that the caller must close. Raises OSError if it is not one."""
    message, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != 1 or len(message) != _HELLO.size or not message.startswith(_MAGIC):
        for fd in fds:
            os.close(fd)
        raise OSError("the other end does not hand out a pool")
    _, boot_id, link_id, size_bytes = _HELLO.unpack(message)
    return Hello(boot_id.decode(), link_id, size_bytes), fds[0]


def pack_ticket(ticket: int) -> bytes:
    return _TICKET.pack(ticket)


def unpack_ticket(message: bytes) -> int:
    """Raises ValueError if the message is not a ticket."""
    if len(message) != _TICKET.size:
        raise ValueError(f"{len(message)} bytes are not a ticket")
    return int(_TICKET.unpack(message)[0])
