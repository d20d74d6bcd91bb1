"""`make mutants`: puts small faults into the code one at a time, runs the fast tests for each, and counts what they notice.

    python -m tests.mutants [--group NAME …] [--processes N] [--out bench/reports/mutants.json] [--goal 0.9]

Takes hours on two cores; `--group` runs a part. `mutmut show NAME` in the folder that is printed for a group shows one mutant.
Exit code 1 if a module's share lies below the goal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.mutants.groups import GROUPS
from tests.mutants.results import Score, as_report, as_table, read_score
from tests.mutants.workspace import ROOT, make_workspace, run_mutmut


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--group", action="append", choices=sorted(GROUPS), help="only this group of modules; may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="mutants under test at once (default: 2)")
    parser.add_argument("--out", type=Path, help="file for the report; modules of other groups stay in it")
    parser.add_argument(
        "--goal", type=float, default=0.9, help="least share of mutants to be noticed in each module (default: 0.9)"
    )
    options = parser.parse_args()
    scores = [score for name in options.group or GROUPS for score in _run(name, options.processes)]
    print(as_table(scores))
    if options.out:
        options.out.write_text(as_report(scores, before=options.out))
    sys.exit(any(score.share < options.goal for score in scores))


def _run(name: str, num_processes: int) -> list[Score]:
    folder = ROOT / "build" / "mutants" / name
    make_workspace(folder, GROUPS[name])
    print(f"{name}: in {folder}", flush=True)
    code = run_mutmut(folder, num_processes)
    if code:
        sys.exit(f"error: mutmut ended with exit code {code}; {folder / 'mutmut.log'} says why")
    return [read_score(folder, module) for module in GROUPS[name].modules]


if __name__ == "__main__":
    main()
