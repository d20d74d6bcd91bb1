"""`twostroke bench`: workloads against a server that runs, or `twostroke bench compare`: against engines that it starts itself.

Exit code 0 if every request succeeded, 1 if any failed, 2 for what the user can mend.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.compare import compare
from bench.load.config import BenchConfig
from bench.load.progress import Progress
from bench.load.report import Report, write_json
from bench.load.session import ServerFailed, bench
from shared.options.config import exit_on_config_error, parse_config

# In the environment of a server it names a folder; here it would be a name.
_NOT_OURS = "TWOSTROKE_MODEL"


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] == "compare":
        compare.main(argv[1:])
        return
    environ = {name: value for name, value in os.environ.items() if name != _NOT_OURS}
    config = parse_config(BenchConfig, argv, "twostroke bench", environ)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(bench(config, Progress(sys.stderr)))
    except ServerFailed as error:
        sys.exit(f"error: {error}")
    _show(config, report)
    if report.num_failed:
        sys.exit(1)


def _show(config: BenchConfig, report: Report) -> None:
    print(report.table())
    if config.json:
        write_json(Path(config.json), report.to_json())


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
