"""Do the checks bite? One small change at a time in the code of a room; the share that some check notices.

    python tests/mutants.py --rooms core plans measure --n 60
    python tests/mutants.py --books nbs/core/04_state.ipynb --n 1000 --tests 0

A mutation changes an operator, a comparison, a number, a condition or an argument of one exported cell, in a copy of the project.
It is killed if a cell of its own notebook fails, or a test of the `--tests` test files that name most of its module. Equivalent
mutations (that change nothing anyone could see) count as survivors, so the share is a lower bound; the survivors are printed.

Left out is what says something and does nothing: numbers and conditions in the words of an error or a warning (the condition that leads
there is changed like any other), `stacklevel=` (to which line a warning points), `repr=` of a field, `strict=` of `zip` (a guard against
mistakes in the code itself), and a change after which the code is the same. Not left out are `__repr__`, `frozen=` and `eq=`, which a
user sees, nor limits, caches and short cuts that only save time or memory.

What makes it fast: a notebook runs once, and at each cell that is to be changed the process forks, so that a mutant needs only the cells
from there on (all of them, where a notebook starts processes that a fork does not take along). Of the tests only those run that call the
changed function in a run without changes. Before anything is counted as killed, the same way of running has to pass without a change:
`CONTROL FAILED` is printed otherwise, and the notebook is left out.
"""
import argparse
import ast
import compileall
import contextlib
import json
import os
import py_compile
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

root = Path(__file__).parent.parent
swaps = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
         ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and"}
signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
         ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or"}


# Making mutants

@dataclass
class Mutant:
    book: Path     # its notebook, from the root of the project
    cell: int      # number of the cell in the notebook
    source: str    # of the cell, as it is
    changed: str   # and with one change
    at: int        # line of the cell in which the change is

    @property
    def lines(self):
        "The line before and after"
        return [text.splitlines()[self.at].strip() for text in (self.source, self.changed)]

    @property
    def functions(self):
        "Names of the functions that may behave differently: the innermost around the change, or else all of the cell"
        every = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        around = [n for n in every if n.lineno <= self.at + 1 <= n.end_lineno]
        return {max(around, key=lambda n: n.lineno).name} if around else {n.name for n in every}


def offset(lines, line, col):
    """Place in the text of a position that `ast` gives, whose columns count bytes."""
    return sum(len(x) for x in lines[:line - 1]) + len(lines[line - 1].encode()[:col].decode())


def between(text, lines, left, right, op):
    """The change of the operator between two nodes, or nothing if it cannot be found in the text."""
    start, end = offset(lines, left.end_lineno, left.end_col_offset), offset(lines, right.lineno, right.col_offset)
    found = re.search(rf"(?<![<>=!]){re.escape(signs[type(op)])}(?![=])", text[start:end])
    if found: yield start + found.start(), start + found.end(), swaps[type(op)]


def changes_of(text):
    """Every (start, end, new text) that makes a mutant of the source of a cell."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and type(node.op) in swaps: yield from between(text, lines, node.left, node.right, node.op)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in swaps:
            yield from between(text, lines, node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BoolOp): yield from between(text, lines, node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield offset(lines, node.lineno, node.col_offset), offset(lines, node.operand.lineno, node.operand.col_offset), ""
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield offset(lines, node.lineno, node.col_offset), offset(lines, node.end_lineno, node.end_col_offset), new
        elif isinstance(node, ast.If | ast.IfExp):
            yield offset(lines, node.test.lineno, node.test.col_offset), offset(lines, node.test.end_lineno, node.test.end_col_offset), "True"


silent = "strict", "stacklevel", "repr"


def words_of(text):
    """The (start, end) of all that only words an error or a warning, and of arguments that do nothing."""
    tree, lines, found = ast.parse(text), text.splitlines(keepends=True), []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in silent and isinstance(node.value, ast.Constant): found.append(node.value)
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call): continue
        name = ast.unparse(call.func)
        if call is not node and name.endswith("Error") or name == "warnings.warn": found.extend(call.args)
    return [(offset(lines, n.lineno, n.col_offset), offset(lines, n.end_lineno, n.end_col_offset)) for n in found]


def mutants(books):
    """A `Mutant` for every change of all exported cells of the notebooks."""
    for book in books:
        for i, cell in enumerate(json.loads((root / book).read_text())["cells"]):
            text = "".join(cell["source"])
            if cell["cell_type"] != "code" or not re.match(r"#\|\s*export", text): continue
            same, words = ast.dump(ast.parse(text)), words_of(text)
            for start, end, new in changes_of(text):
                changed = text[:start] + new + text[end:]
                try: tree = ast.parse(changed)
                except SyntaxError: continue
                if ast.dump(tree) == same or any(first <= start and end <= last for first, last in words): continue
                yield Mutant(book, i, text, changed, text[:start].count("\n"))


# Processes

def forked(work, seconds):
    """What `work` returns, a text or nothing, in a process of its own; "never ends" if it has to be ended."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        os.close(reading)
        try: said = work() or ""
        except BaseException as e: said = f"{type(e).__name__}: {e}"   # noqa: BLE001  whatever a mutant may do
        with contextlib.suppress(OSError): os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    said = ended_within(pid, reading, seconds)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError, PermissionError): os.killpg(pid, signal.SIGKILL)   # and what it has started
    return said


def ended_within(pid, reading, seconds):
    """What a process writes before it ends."""
    until, said = time.monotonic() + seconds, b""
    while time.monotonic() < until:
        if not select.select([reading], [], [], max(0, until - time.monotonic()))[0]: continue
        new = os.read(reading, 4000)
        said += new
        if new: continue
        os.waitpid(pid, 0)
        return said.decode()
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "never ends"


def quiet():
    """Nothing of this process is printed from here on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2): os.dup2(nowhere, stream)


def warm_up():
    """Import what all notebooks and tests need, but nothing of the package."""
    import fastai.callback.schedule
    import fastai.learner  # noqa: F401
    import matplotlib
    import pandas  # noqa: F401
    import pytest  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch
    import torch_pruning  # noqa: F401
    import torchvision  # noqa: F401
    from IPython.core.interactiveshell import InteractiveShell  # noqa: F401
    from nbdev.test import nb_test_cells  # noqa: F401
    matplotlib.use("agg")
    torch.set_num_threads(1)


def project_in(folder):
    """A copy of the project. Its compiled files are told by what is in them, since a mutant is written within a second."""
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".ipynb_checkpoints"))
    (folder / ".venv").symlink_to(root / ".venv")
    compileall.compile_dir(folder / "fasterai_sens", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)   # for processes that notebooks and tests start
    os.environ["OMP_NUM_THREADS"] = "1"
    return folder


# Its notebook

@contextlib.contextmanager
def unwritten(folder):
    """What the block writes to a folder is gone after it: processes that fork share no memory, but their files."""
    kept = Path(f"{folder}-kept")
    shutil.copytree(folder, kept)
    try: yield
    finally:
        shutil.rmtree(folder)
        kept.rename(folder)


class Walk:
    """A notebook that runs once; at each changed cell it forks for every mutant of it."""
    def __init__(self, copy, book):
        from IPython.core.interactiveshell import InteractiveShell
        from nbdev.test import nb_test_cells
        from traitlets.config import Config

        class Shell(InteractiveShell):
            def enable_gui(self, gui=None): "There is none."
        os.chdir((copy / book).parent)
        os.environ["IN_TEST"] = "1"
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(dir=copy)   # what the notebook writes
        config = Config(HistoryManager=dict(hist_file=":memory:", enabled=False))
        self.shell = Shell.instance(config=config)
        self.shell.enable_matplotlib("inline")
        self.cells = [(cell.idx_, cell.source) for cell in nb_test_cells(copy / book)]

    def run(self, source):
        """The name of what a cell raises, or nothing."""
        from IPython.utils.capture import capture_output
        with capture_output(): done = self.shell.run_cell(source, store_history=False)
        error = done.error_in_exec or done.error_before_exec
        return type(error).__name__ if error else ""

    def go(self, start, mutant=None):
        """Run all cells from `start` on, with a mutant in the place of its cell; says where it stops."""
        for i, own in self.cells:
            if i < start: continue
            stopped = self.run(mutant.changed if mutant and i == mutant.cell else own)
            if stopped: return f"cell {i}: {stopped}"
        return ""

    def visit(self, found, by_cell, module, seconds):
        """Tell `found` what each mutant of `by_cell` (number of the cell -> mutants) stops with."""
        last = max(by_cell)
        for i, own in self.cells:
            if i == last:
                with unwritten(Path(tempfile.tempdir)): stopped = forked(lambda i=i: self.go(i), seconds)
                if stopped: return f"forked at {stopped}"
            for mutant in by_cell.get(i, []):
                with module.holding(mutant), unwritten(Path(tempfile.tempdir)):
                    stopped = forked(lambda i=i, m=mutant: self.go(i, m), seconds)
                found(mutant, stopped or (again if module.full_name in sys.modules else ""))
            stopped = self.run(own)
            if stopped: return f"cell {i}: {stopped}"
        return ""


again = "once more, from the start"   # the notebook has imported the module as it was before the fork


class Module:
    """The generated module of a notebook in the copy."""
    def __init__(self, copy, book):
        self.cells = json.loads((root / book).read_text())["cells"]
        self.name = next(m[1] for c in self.cells if (m := re.search(r"default_exp\s+(\S+)", "".join(c["source"]))))
        self.full_name = f"fasterai_sens.{self.name}"
        self.path = copy / f"{self.full_name.replace('.', '/')}.py"
        self.text = self.path.read_text()

    def changed(self, mutant):
        """The text with the same line changed as in the cell."""
        before = mutant.source.splitlines()
        old, new = before[mutant.at], mutant.changed.splitlines()[mutant.at]
        start = self.text.index(f"#{self.cells[mutant.cell]['id']}\n")
        for _ in range(before[:mutant.at].count(old) + 1): start = self.text.index(f"\n{old}\n", start) + 1
        return self.text[:start] + new + self.text[start + len(old):]

    @contextlib.contextmanager
    def holding(self, mutant):
        """The file is the mutant's in the block."""
        self.path.write_text(self.changed(mutant))
        try: yield
        finally: self.path.write_text(self.text)


def in_notebook(copy, book, drawn, seconds):
    """For each mutant drawn from one notebook what stops the notebook; and what stops it without a change."""
    module, by_cell, answers = Module(copy, book), defaultdict(list), {}
    for mutant in drawn: by_cell[mutant.cell].append(mutant)
    file = copy / "found.json"

    def found(mutant, stopped):
        answers[drawn.index(mutant)] = stopped
        file.write_text(json.dumps(answers))

    def walk():
        quiet()
        return Walk(copy, book).visit(found, by_cell, module, seconds)

    def whole(mutant):
        quiet()
        return Walk(copy, book).go(0, mutant)
    file.write_text("{}")
    failed = forked(walk, 24*3600)
    answers = json.loads(file.read_text())
    stops = [answers.get(str(i), "") for i in range(len(drawn))]
    if failed:   # perhaps it has started processes, which a fork does not take along
        stops = [again for _ in drawn]
        failed = forked(lambda: whole(None), seconds)
        if failed: return stops, failed
    for i, mutant in enumerate(drawn):
        if stops[i] != again: continue
        with module.holding(mutant): stops[i] = forked(lambda m=mutant: whole(m), seconds)
    return stops, failed


# The tests

class Calls:
    """A plugin of pytest: which functions of the package each test calls, and how long it takes."""
    def __init__(self, package):
        self.package, self.of, self.seconds = str(package), {}, {}

    def trace(self, frame, event, arg):
        """Called at each call of a Python function; looks at no line."""
        code = frame.f_code
        if code.co_filename.startswith(self.package): self.now.add((code.co_filename[len(self.package) + 1:], code.co_name))

    def pytest_runtest_logstart(self, nodeid):
        """Around fixtures, too."""
        self.now, self.start = set(), time.monotonic()
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logfinish(self, nodeid):
        """What was called from the start on."""
        sys.settrace(None)
        threading.settrace(None)
        self.of[nodeid], self.seconds[nodeid] = sorted(self.now), time.monotonic() - self.start


class Checked:
    """A plugin of pytest: the first test that fails."""
    def __init__(self): self.failed = ""
    def pytest_runtest_logreport(self, report):
        """Of setup, call and teardown."""
        if report.failed and not self.failed: self.failed = report.nodeid


def pytest_in(copy, plugin, *args):
    """Run pytest here, in the copy."""
    import pytest
    quiet()
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests")]
    return pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *args], plugins=[plugin])


def tests_of(module, n):
    """The `n` test files that name most often something public of a module."""
    found = re.search(r"__all__ = \[(.*?)\]", module.text, re.S)
    names = re.findall(r"'(\w+)'", found[1]) if found else []
    if not names or not n: return []
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    files = [p for p in (root / "tests").glob("test_*.py") if p.name not in ("test_structure.py", "test_readme.py")]
    counts = {p.name: len(pattern.findall(p.read_text())) for p in files}
    return sorted((name for name in counts if counts[name]), key=lambda name: (counts[name], name))[-n:]


def calls_in(copy, cache, name):
    """Test -> (seconds, functions it calls) of one test file; from the folder `cache` if they were recorded before."""
    file = cache / f"{name}.json"
    if not file.exists():
        print(f"    recording what {name} calls", flush=True)

        def work():
            plugin = Calls(copy / "fasterai_sens")
            pytest_in(copy, plugin, f"tests/{name}")
            made = {test: (plugin.seconds[test], plugin.of[test]) for test in plugin.of}
            file.write_text(json.dumps(made))
        forked(work, 3600)
    return json.loads(file.read_text())


def in_tests(copy, cache, module, mutant, args):
    """The first test that fails with a mutant, of those that call what is changed, the fastest first."""
    own, tests = str(module.path.relative_to(copy / "fasterai_sens")), {}
    for name in tests_of(module, args.tests):
        for test, (seconds, calls) in calls_in(copy, cache, name).items():
            called = {function for file, function in calls if file == own}
            if called & mutant.functions or called and not mutant.functions: tests[test] = seconds
    chosen, spent = [], 0.
    for test in sorted(tests, key=tests.get):
        spent += tests[test]
        if spent > args.budget and chosen: break
        chosen.append(test)
    if not chosen: return ""

    def work():
        checked = Checked()
        status = pytest_in(copy, checked, "-x", *chosen)
        return checked.failed or ("tests end early" if status else "")
    with module.holding(mutant): stop = forked(work, args.seconds)
    control = forked(work, 10*args.seconds) if stop else ""
    if control:   # so it says nothing of the mutant
        print(f"    CONTROL FAILED: {control}", flush=True)
        return ""
    return stop


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--rooms", nargs="+", default=["core", "plans", "measure"])
    parse.add_argument("--books", nargs="+", type=Path, help="notebooks, instead of rooms")
    parse.add_argument("--n", type=int, default=60, help="mutants, drawn at random")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--seconds", type=int, default=600, help="most for what one mutant runs")
    parse.add_argument("--tests", type=int, default=4, help="most test files for one mutant, those that name its module most")
    parse.add_argument("--budget", type=float, default=60, help="most seconds that the tests for one mutant take without a change")
    parse.add_argument("--cache", type=Path, help="folder that keeps which test calls what, from one run to the next")
    args = parse.parse_args()
    books = args.books or [p.relative_to(root) for room in args.rooms for p in sorted((root / "nbs" / room).glob("*.ipynb"))]
    everything = list(mutants(books))
    drawn = random.Random(args.seed).sample(everything, min(args.n, len(everything)))
    warm_up()
    killed = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = project_in(Path(folder) / "project")
        cache = args.cache or Path(folder) / "calls"
        cache.mkdir(exist_ok=True, parents=True)
        for book in books:
            own = [m for m in drawn if m.book == book]
            if not own: continue
            stops, failed = in_notebook(copy, book, own, args.seconds)
            if failed:
                print(f"CONTROL FAILED {book}: {failed}", flush=True)
                continue
            for mutant, stop in zip(own, stops, strict=True):
                by = stop or in_tests(copy, cache, Module(copy, book), mutant, args)
                killed, tried = killed + bool(by), tried + 1
                old, new = mutant.lines
                print(f"{tried:4}/{len(drawn)} {by or 'SURVIVED':30} {book} cell {mutant.cell}\n      - {old}\n      + {new}", flush=True)
    print(f"{killed} of {tried} killed ({100*killed/max(1, tried):.1f} %), drawn from {len(everything)} in {', '.join(map(str, args.books or args.rooms))}")


if __name__ == "__main__": main()
