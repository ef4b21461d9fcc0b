"""Run notebooks, each in a process of its own: `python tests/run_notebooks.py [-j 2] [nbs/core ...]`.

What every notebook imports is imported once, before the processes fork: that is most of the time of a short notebook.
"""

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import fastai.callback.schedule
import fastai.learner  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch_pruning  # noqa: F401
import torchvision  # noqa: F401
from joblib.externals.loky import get_reusable_executor
from nbdev.test import test_nb

root = Path(__file__).parent.parent
FIRST = ("tutorials", "show", "plans")  # the rooms with the longest notebooks, so that none of them is left for the end


def find_notebooks(places):
    """All notebooks in `places`, long ones first"""
    found = [p for place in places for p in ([place] if place.suffix else place.rglob("*.ipynb"))]
    found = [p.resolve() for p in found if not any(part.startswith(".") for part in p.parts)]
    room = {name: i for i, name in enumerate(FIRST)}
    return sorted(found, key=lambda p: (room.get(p.parent.name, len(FIRST)), str(p)))


def run(path):
    """The process of one notebook: its exit status says whether all cells ran"""
    passed, _ = test_nb(path, basepath=root)
    get_reusable_executor(reuse=True).shutdown(kill_workers=True)  # or a forked process waits five minutes for its workers
    sys.exit(not passed)


def run_all(notebooks, jobs):
    """Run so many at a time, print each as it ends; those that failed"""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    todo, running, failed = notebooks[::-1], {}, []
    while todo or running:
        while todo and len(running) < jobs:
            path = todo.pop()
            process = context.Process(target=run, args=(path,))
            process.start()
            running[process.sentinel] = process, path, time.monotonic()
        for sentinel in wait(running):
            process, path, start = running.pop(sentinel)
            process.join()
            if process.exitcode:
                failed.append(path)
            ending = ", FAILED" if process.exitcode else ""
            print(f"{path.relative_to(root)}: {time.monotonic() - start:.0f} s{ending}", flush=True)
    return failed


def main():
    """Run them, and fail if one failed"""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", type=Path, default=[root / "nbs"], help="notebooks and folders; all, if left out")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    args = parser.parse_args()
    notebooks = find_notebooks(args.places)
    failed = run_all(notebooks, args.jobs)
    print(f"{len(notebooks)} notebooks, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
