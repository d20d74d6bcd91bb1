"""`python -m tests.chaos`: the long form. Prints its seed, and ends with exit code 1 if anything was lost, repeated or kept.

Takes some minutes. As root it also loses packets between network namespaces and fills a disk.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos import disk, faults, strangers, wire
from tests.chaos.report import Report
from tests.chaos.run import Chaos
from tests.chaos.site import site

_NUM_LANES = 2  # faults that may last at the same time


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Load and random faults on real processes.")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of requests and faults; default: random")
    parser.add_argument("--num-requests", type=int, default=3000)
    parser.add_argument("--num-faults", type=int, default=200)
    parser.add_argument("--report", type=Path, default=Path("bench/reports/chaos.json"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    report = asyncio.run(_run(folder, options.seed, options.num_requests, options.num_faults))
    report.write(options.report)
    print(f"{report.num_exact} of {report.num_requests} requests exact, {report.num_faults} faults, {report.duration_s} s")
    print(f"report: {options.report}")
    for violation in report.violations:
        print(f"VIOLATION: {violation}")
    if report.violations:
        sys.exit(f"seed {options.seed} failed; logs are in {folder}")
    shutil.rmtree(folder)


async def _run(folder: Path, seed: int, num_requests: int, num_faults: int) -> Report:
    kinds: tuple[type[faults.Fault], ...] = (*faults.EVERYWHERE, *strangers.EVERYWHERE)
    reason = wire.why_impossible() or disk.why_impossible()
    if reason is None:
        kinds = (*kinds, faults.LosePackets, strangers.FillDisk)
    else:
        print(f"without lost packets and full disks: {reason}")
    async with site(folder, random.Random(seed), is_root=reason is None) as made:
        chaos = Chaos(made, seed, say=lambda text: print(text, flush=True))
        report = await chaos.run(kinds, num_faults, num_requests, _NUM_LANES)
    report.without = [f"LosePackets, FillDisk: {reason}"] if reason else []
    return report


if __name__ == "__main__":
    main()
