"""Which modules are mutated, and which tests are run for them: the fast ones that are about them.

End-to-end and chaos tests are left out on purpose. They pass with many small faults in, since failover hides them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    modules: tuple[str, ...]  # paths
    tests: tuple[str, ...]  # globs


GROUPS: dict[str, Group] = {
    "schedule": Group(
        modules=tuple(f"shared/engine/schedule/{name}.py" for name in ("scheduler", "blocks", "prefix_cache", "lookahead")),
        tests=(
            "tests/unit/test_blocks*.py",
            "tests/unit/test_scheduler*.py",
            "tests/unit/test_lookahead*.py",
            "tests/unit/test_prefix_cache*.py",
            "tests/unit/test_seats*.py",
        ),
    ),
    "sampling": Group(
        modules=tuple(f"shared/engine/compute/{name}.py" for name in ("sampler", "penalties")),
        tests=("tests/unit/test_sampler*.py", "tests/unit/test_penalties*.py"),
    ),
    "handoff": Group(
        modules=(
            "shared/transfer/handoff/receiver.py",
            "shared/transfer/handoff/sender.py",
            "shared/transfer/transports/chunks.py",
            "shared/transfer/transports/heads.py",
        ),
        tests=(
            "tests/unit/test_chunks*.py",
            "tests/unit/test_pool_group*.py",
            "tests/unit/test_receiver*.py",
            "tests/unit/test_sender*.py",
            "tests/services/test_handoff*.py",
            "tests/services/test_receiver*.py",
            "tests/services/test_split_pools*.py",
        ),
    ),
    "dispatch": Group(
        modules=tuple(f"services/router/dispatch/{name}.py" for name in ("generation", "fleet", "placement")),
        tests=(
            "tests/unit/test_fleet*.py",
            "tests/unit/test_generation*.py",
            "tests/unit/test_placement*.py",
            "tests/services/test_failover*.py",
            "tests/services/test_fleet*.py",
            "tests/services/test_generation*.py",
        ),
    ),
    "text": Group(
        modules=("services/router/http/run.py", "services/router/text/choice.py", "services/router/text/stops.py"),
        tests=(
            "tests/unit/test_choice*.py",
            "tests/unit/test_detokenizer*.py",
            "tests/unit/test_run*.py",
            "tests/unit/test_stops*.py",
            "tests/services/test_http_api*.py",
        ),
    ),
    "index": Group(
        modules=tuple(f"shared/index/{name}.py" for name in ("prefix_index", "registry", "block_publisher")),
        tests=("tests/services/test_index*.py", "tests/unit/test_block_hash*.py", "tests/unit/test_registry*.py"),
    ),
    "supervisor": Group(
        modules=("services/local/supervisor.py",),
        tests=("tests/unit/test_supervisor*.py",),
    ),
}
