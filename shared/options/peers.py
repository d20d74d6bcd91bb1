"""How the processes of one cluster know each other: the options that every router and worker has in common."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.options.config import option

MIN_SECRET_CHARS = 16
DEFAULT_NAMESPACE = "default"
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """The fleet that a process belongs to, the cluster secret, and mTLS for gRPC: with it, each side of a call presents a
    certificate that the other one checks."""

    namespace: str = option(
        DEFAULT_NAMESPACE, "routers and workers of one namespace find each other; another one on the same Redis is another fleet"
    )
    cluster_secret: str = option(
        "", "what every call between routers and workers must bear; better given as a variable or by file", secret=True
    )
    cluster_secret_file: str = option("", "file with the cluster secret, the same on all machines; empty: none is asked for")
    tls_cert: str = option("", "certificate chain (PEM file) of this process for gRPC; empty: plain text")
    tls_key: str = option("", "private key (PEM file) of --tls-cert")
    tls_ca: str = option("", "CA bundle (PEM file) that peers' certificates must chain to")

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(f"--namespace is {self.namespace!r}; it must be 1 to 64 letters, digits, '-', '_' or '.'")
        if self.cluster_secret and self.cluster_secret_file:
            raise ValueError("--cluster-secret and --cluster-secret-file exclude each other")
        if self.cluster_secret:
            check_secret(self.cluster_secret, "--cluster-secret")
        tls = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        missing = [flag for flag, value in tls.items() if not value]
        if missing and len(missing) < len(tls):
            raise ValueError(f"--tls-cert, --tls-key and --tls-ca go together; {' and '.join(missing)} missing")


def check_secret(secret: str, source: str) -> None:
    """Raises ValueError, without the secret, for one that is easily guessed or that gRPC's metadata cannot carry."""
    if len(secret) < MIN_SECRET_CHARS:
        raise ValueError(f"{source} has {len(secret)} characters; it must have at least {MIN_SECRET_CHARS}")
    if not (secret.isascii() and secret.isprintable()) or secret != secret.strip():
        raise ValueError(f"{source} must consist of printable ASCII characters, without spaces around them")
