"""Let evaluations go wrong, at every call in turn, and see whether the model is as it was: `python benchmarks/faults.py`."""
import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from test_faults import ENTRIES, FAULTS, LEVELS, survived  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), help="which ones; all, if left out")
    parser.add_argument("--methods", nargs="+", choices=list(LEVELS), default=list(LEVELS), help="which ones; all, if left out")
    parser.add_argument("--kinds", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="which ones; all, if left out")
    args = parser.parse_args()
    folder, total = Path(tempfile.mkdtemp()), Counter()
    print(f"faults: {', '.join(args.kinds)}\n{'':14}" + "".join(f"{method:>16}" for method in args.methods))
    for entry in args.entries:
        cells = []
        for method in args.methods:
            found = Counter()
            for kind in args.kinds:
                found += survived(entry, method, kind, folder, (0, 1) if entry == "workers" else None)
            total += found
            cells.append(f"{found['raised']} + {found['finished']}" if found else "refused")
        print(f"{entry:14}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    print(f"{total.total()} faults: {total['raised']} raised with what was measured, {total['finished']} ended well (a broken layer); models changed: 0")
