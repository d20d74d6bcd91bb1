"""The unix socket between a sender and a receiver of one machine: who is at the other end, and what is said over it.

    receiver -> sender   PoolGreeting, with a memfd for each pool in main memory: once
    receiver -> sender   writer_id: end this attempt
    sender -> receiver   writer_id: ended, nothing more will be written for it
    sender -> receiver   GOODBYE: nothing more will be written at all; then the end of the stream

Messages keep their boundaries (SOCK_SEQPACKET). The kernel closes the socket of a process that is dead, and not before none of its
threads can run: the end of the stream proves that the sender's threads write no more. What they began on a device may still be
under way; that is over when the process has ended as a whole (`ProcessEnd`), because the device's driver is among its open files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from shared.rpc import kv_pb2

_WRITER_ID = struct.Struct("<Q")
_UCRED = struct.Struct("3i")  # pid, uid, gid
_FOLDER_PREFIX = "twostroke-shm-"
_SOCKET_NAME = "pool"
MAX_MESSAGE_BYTES = 64
_MAX_GREETING_BYTES = 16 * 1024
_MAX_POOLS = 64
GOODBYE = 0  # no attempt's writer_id


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
        if _is_ours(folder) and _is_dead(folder / _SOCKET_NAME):
            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)  # a process that is stopped may have a full backlog: it is not dead
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # full, or just being made
    return False


def is_same_user(connection: socket.socket) -> bool:
    """The pool is as open to whoever maps it as this process's own memory, so only this user may."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(raw)[1] == os.geteuid())


class ProcessEnd:
    """The end of the process that connected, its open files included."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError if the process cannot be watched, as from another container's process namespace."""
        pid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
        if pid == 0:
            raise OSError("its process is not visible from here")
        self._fd = os.pidfd_open(pid)

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def send_greeting(connection: socket.socket, greeting: kv_pb2.PoolGreeting, fds: Sequence[int]) -> None:
    socket.send_fds(connection, [greeting.SerializeToString()], fds)


def receive_greeting(connection: socket.socket) -> tuple[kv_pb2.PoolGreeting, list[int]]:
    """The receiver's greeting and descriptors that the caller must close. Raises OSError if it is not one."""
    message, fds, flags, _ = socket.recv_fds(connection, _MAX_GREETING_BYTES, _MAX_POOLS, socket.MSG_CMSG_CLOEXEC)
    try:
        greeting = kv_pb2.PoolGreeting.FromString(message)
    except DecodeError:
        greeting = kv_pb2.PoolGreeting()
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not greeting.pools or len(greeting.link_id) != 16:
        for fd in fds:
            os.close(fd)
        raise OSError("the other end does not hand out a pool")
    return greeting, fds


def pack_writer_id(writer_id: int) -> bytes:
    return _WRITER_ID.pack(writer_id)


def unpack_writer_id(message: bytes) -> int:
    """Raises ValueError if the message is not a writer_id."""
    if len(message) != _WRITER_ID.size:
        raise ValueError(f"{len(message)} bytes are not a writer_id")
    return int(_WRITER_ID.unpack(message)[0])
