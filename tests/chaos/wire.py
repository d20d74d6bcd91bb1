"""A network namespace at the end of a wire that loses and delays packets.

    this namespace   10.77.N.1 ─ TUN device ─> this process: lose, delay ─> TUN device ─ 10.77.N.2   the other namespace

Real IP packets, and so real retransmissions; no kernel module is needed. Needs root.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

_TUN_DEVICE = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA  # <linux/if_tun.h>
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_PACKET_BYTES = 2048


def why_impossible() -> str | None:
    """None if namespaces can be made here."""
    if os.geteuid() != 0:
        return "this user is not root"
    if not _TUN_DEVICE.exists():
        return f"there is no {_TUN_DEVICE}"
    try:
        _run("ip", "netns", "list")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"`ip netns` does not work: {error}"
    return None


class Wire:
    """`loss` is the share of packets lost, `delay_s` what each takes longer, in each direction."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.namespace = f"twostroke-{os.getpid()}-{number}"
        self.near_host, self.far_host = f"10.77.{number}.1", f"10.77.{number}.2"
        self.loss = 0.0
        self.delay_s = 0.0
        self._rng = rng
        self._near_device, self._far_device = f"tschaos{number}n", f"tschaos{number}f"
        self._fds: list[int] = []

    def connect(self) -> None:
        """Inside a running event loop, which does the forwarding."""
        _run("ip", "netns", "add", self.namespace)
        try:
            near, far = _tun(self._near_device), _tun(self._far_device)
            self._fds = [near, far]
            _run("ip", "link", "set", self._far_device, "netns", self.namespace)
            _run("ip", "address", "add", self.near_host, "peer", self.far_host, "dev", self._near_device)
            _run("ip", "link", "set", self._near_device, "up")
            inside = ("ip", "-n", self.namespace)
            _run(*inside, "address", "add", self.far_host, "peer", self.near_host, "dev", self._far_device)
            _run(*inside, "link", "set", self._far_device, "up")
            _run(*inside, "link", "set", "lo", "up")
        except BaseException:
            self.disconnect()
            raise
        loop = asyncio.get_running_loop()
        loop.add_reader(near, self._carry, near, far)
        loop.add_reader(far, self._carry, far, near)

    def disconnect(self) -> None:
        for fd in self._fds:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._fds = []
        _run("ip", "netns", "delete", self.namespace)

    @property
    def enter_command(self) -> tuple[str, ...]:
        """What goes ahead of a command that is to run in the namespace."""
        return ("ip", "netns", "exec", self.namespace)

    def _carry(self, source: int, target: int) -> None:
        packet = os.read(source, _PACKET_BYTES)
        if self._rng.random() < self.loss:
            return
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self._deliver, target, packet)
        else:
            self._deliver(target, packet)

    def _deliver(self, target: int, packet: bytes) -> None:
        if target in self._fds:
            with suppress(OSError):  # a full queue, or a device that is down: lost, as packets are
                os.write(target, packet)


def _tun(name: str) -> int:
    fd = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    return fd


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
