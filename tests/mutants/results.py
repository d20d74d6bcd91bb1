"""What mutmut left behind, counted by module."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Exit codes that mutmut notes: pytest's own, and its own for a mutant that no test reaches or that runs out of time.
_SURVIVED, _UNREACHED = (0,), (5, 33)
_NOT_RUN = (None, 2, 34)


@dataclass(frozen=True, slots=True)
class Score:
    module: str
    num_noticed: int
    survivors: tuple[str, ...]  # as mutmut names them, those that no test reaches among them
    num_not_run: int

    @property
    def num_run(self) -> int:
        return self.num_noticed + len(self.survivors)

    @property
    def share(self) -> float:
        return self.num_noticed / self.num_run if self.num_run else 0.0


def read_score(folder: Path, module: str) -> Score:
    codes = json.loads((folder / "mutants" / f"{module}.meta").read_text())["exit_code_by_key"]
    kinds = Counter(_kind(code) for code in codes.values())
    survivors = tuple(sorted(name for name, code in codes.items() if _kind(code) == "survived"))
    return Score(module, kinds["noticed"], survivors, kinds["not run"])


def _kind(code: int | None) -> str:
    if code in _NOT_RUN:
        return "not run"
    return "survived" if code in _SURVIVED + _UNREACHED else "noticed"


def as_table(scores: Iterable[Score]) -> str:
    scores = list(scores)
    num_run, num_noticed = sum(s.num_run for s in scores), sum(s.num_noticed for s in scores)
    rows = [f"{s.module:<48} {s.num_run:>7} {s.num_noticed:>8} {s.share:>7.1%}" for s in scores]
    total = f"{'all':<48} {num_run:>7} {num_noticed:>8} {num_noticed / max(num_run, 1):>7.1%}"
    return "\n".join([f"{'module':<48} {'mutants':>7} {'noticed':>8} {'share':>7}", *rows, total])


def as_report(scores: Iterable[Score], before: Path) -> str:
    """JSON with a row per module; rows of modules that were not run now are those of the report `before`, if there is one."""
    rows = {row["module"]: row for row in json.loads(before.read_text())} if before.exists() else {}
    rows |= {score.module: _row(score) for score in scores}
    return json.dumps([rows[module] for module in sorted(rows)], indent=1) + "\n"


def _row(score: Score) -> dict[str, object]:
    return {
        "module": score.module,
        "mutants": score.num_run,
        "noticed": score.num_noticed,
        "share": round(score.share, 3),
        "not_run": score.num_not_run,
        "survivors": list(score.survivors),
    }
