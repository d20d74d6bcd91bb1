"""What a run of chaos found, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Report:
    """A run is good if `violations` is empty."""

    seed: int
    duration_s: float = 0.0
    num_streams: int = 0
    num_requests: int = 0  # answered by a router that lived
    num_exact: int = 0
    requests_by_kind: Mapping[str, int] = field(default_factory=dict)
    num_retried_after_router_kill: int = 0
    num_clients_left: int = 0
    slowest_request_s: float = 0.0
    num_faults: int = 0
    faults_by_kind: Mapping[str, int] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)  # kinds of faults that could not be injected here, and why
    failures_by_leg_and_cause: Mapping[str, int] = field(default_factory=dict)
    transfers_by_result: Mapping[str, int] = field(default_factory=dict)
    refused_messages_by_cause: Mapping[str, int] = field(default_factory=dict)
    footprints_before: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    footprints_after: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
