"""Kill a sweep, a search and an estimate at random moments, again and again, and let them end: `python benchmarks/journal.py --kills 30`."""
import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from test_journal import survived  # noqa: E402

KINDS = "sweep", "search", "estimate"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="how often each of them is killed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="which ones; all, if left out")
    args = parser.parse_args()
    print("| | killed with SIGKILL | evaluations, undisturbed | looks at the untouched model, all processes | measured twice, in flight | passes with gradients again | result |")
    print("|---|---|---|---|---|---|---|")
    for kind in args.kinds:
        found = survived(kind, Path(tempfile.mkdtemp()), args.kills)
        result = "identical" if found.is_same else "DIFFERS"
        print(f"| {kind} | {found.kills} | {found.n} | {found.baselines} | {found.twice} | {found.gradients} | {result} |", flush=True)
