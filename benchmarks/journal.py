"""Kill a sweep and a search at random moments, again and again, and let them end: `python benchmarks/journal.py --kills 30`."""
import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from test_journal import survived  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="how often each of them is killed")
    args = parser.parse_args()
    for kind in ("sweep", "search"):
        same, n, baselines, twice = survived(kind, Path(tempfile.mkdtemp()), args.kills)
        print(f"{kind}: {args.kills} kills; result {'identical' if same else 'DIFFERS'}; {n} evaluations undisturbed; "
              f"{baselines} baselines in all processes; measured twice since it was in flight: {twice}")
