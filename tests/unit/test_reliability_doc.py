"""Every test that `docs/reliability.md` names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_document_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert named - set(re.findall(r"def (test_\w+)\(", sources)) == set()


def test_every_fault_has_an_explanation_and_a_test() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text().partition("## Kinds of faults")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "| ---"))]
    assert len(rows) > 40
    for row in rows:
        _, *cells, tests, _ = row.split("|")
        assert all(cell.strip() for cell in cells), row
        assert "test_" in tests, row
