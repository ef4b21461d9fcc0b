"""Models of every kind: the table of the page is whole, and a selection of them keeps the promises now."""
import sys
from pathlib import Path

import pytest

root = Path(__file__).parent.parent
sys.path.insert(0, str(root / "benchmarks"))
from models import from_line, levels, look, models, told, totals  # noqa: E402 (a script, not a package)

page = (root / "docs" / "architectures.md").read_text(encoding="utf-8")
rows = [row for row in map(from_line, page.splitlines()) if row]


def test_the_page_has_every_model():
    """One row for each, in the order of the list, and a sentence with their number"""
    assert [row["model"] for row in rows] == list(models)
    assert f"goes through {len(models)} models" in page


def test_every_unit_is_measured_or_refused():
    """By each method of each model; and what stands above the rows is their sum"""
    for row in rows:
        for method in levels:
            measured, reasons, _ = row[method]
            assert measured + reasons.total() == row["units"] > 0, (row["model"], method)
            assert all(reasons), "each refusal has its reason"
    assert totals(rows) in page


@pytest.mark.slow
@pytest.mark.parametrize("name", (
    "segmentation: LRASPP", "detection: FCOS", "timm: test_byobnet", "timm: deit_tiny_patch16_224", "transformers: llama_grouped_queries",
    "transformers: whisper", "fastai: tabular", "recurrent: lstm", "audio: wavenet", "computed weights: weight_norm"))
def test_the_promises_hold(name):
    """The model comes back bit for bit, what is measured is what a copy scores, with and without reuse; and the page has the numbers"""
    row = look(name, 30)
    assert "failed" not in row and not any(row[method][2] for method in levels), told(row)
    written = next(r for r in rows if r["model"] == name)
    assert [row["units"], *(row[m][0] for m in levels)] == [written["units"], *(written[m][0] for m in levels)]
