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
        modules=tuple(
            f"shared/engine/schedule/{name}.py"
            for name in ("scheduler", "lines", "outputs", "blocks", "prefix_cache", "lookahead", "limits")
        ),
        tests=(
            "tests/unit/test_blocks*.py",
            "tests/unit/test_scheduler*.py",
            "tests/unit/test_lookahead*.py",
            "tests/unit/test_prefix_cache*.py",
        ),
    ),
    "sampling": Group(
        modules=tuple(f"shared/engine/compute/{name}.py" for name in ("sampler", "penalties")),
        tests=("tests/unit/test_sampler*.py",),
    ),
    "handoff": Group(
        modules=(
            "shared/transfer/handoff/manifest.py",
            "shared/transfer/handoff/receiver.py",
            "shared/transfer/handoff/sender.py",
            "shared/transfer/transports/chunks.py",
            "shared/transfer/transports/heads.py",
        ),
        tests=(
            "tests/unit/test_chunks*.py",
            "tests/unit/test_pool_group*.py",
            "tests/unit/test_shipped_layers*.py",
            "tests/services/test_handoff*.py",
            "tests/services/test_receiver*.py",
            "tests/services/test_split_pools*.py",
            "tests/services/test_transports*.py",
        ),
    ),
    "dispatch": Group(
        modules=tuple(
            f"services/router/dispatch/{name}.py"
            for name in (
                "attempt",
                "choices",
                "failover",
                "fleet",
                "generation",
                "legs",
                "outputs",
                "placement",
                "pools",
                "prefill_leg",
                "rests",
                "retries",
                "silence",
            )
        ),
        tests=(
            "tests/unit/test_fleet*.py",
            "tests/unit/test_placement*.py",
            "tests/services/test_decode_streams*.py",
            "tests/services/test_failover*.py",
            "tests/services/test_unreachable*.py",
        ),
    ),
    "text": Group(
        modules=(
            "services/router/http/run.py",
            "services/router/http/fanout.py",
            "services/router/text/choice.py",
            "services/router/text/logprobs.py",
            "services/router/text/stops.py",
        ),
        tests=(
            "tests/unit/test_detokenizer*.py",
            "tests/unit/test_logprobs*.py",
            "tests/services/test_http_api*.py",
            "tests/services/test_http_connections*.py",
        ),
    ),
    "index": Group(
        modules=tuple(
            f"shared/index/{name}.py"
            for name in ("block_publisher", "entries", "fleet_view", "prefix_index", "recent_holders", "registration", "watcher")
        ),
        tests=("tests/services/test_index*.py", "tests/unit/test_block_hash*.py", "tests/unit/test_entries*.py"),
    ),
    "supervisor": Group(
        modules=("services/local/supervisor.py",),
        tests=("tests/unit/test_supervisor*.py",),
    ),
}
