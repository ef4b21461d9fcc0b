"""Do the checks bite? One small change at a time in the code of a room; the share that some check notices.

    python tests/mutants.py --rooms core plans measure --n 60

A mutation changes an operator, a comparison, a number, a condition or an argument of one exported cell, in a copy of the project.
It is killed if the cell's notebook fails, or one of the `--tests` test files that name most of its module, within `--seconds`. Equivalent
mutations (that change nothing anyone could see) count as survivors, so the share is a lower bound; the survivors are printed.
"""
import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

root = Path(__file__).parent.parent
swaps = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
         ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and"}
signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
         ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or"}


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
            if text[:offset(lines, node.lineno, node.col_offset)].endswith("strict="): continue
            new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield offset(lines, node.lineno, node.col_offset), offset(lines, node.end_lineno, node.end_col_offset), new
        elif isinstance(node, ast.If | ast.IfExp):
            yield offset(lines, node.test.lineno, node.test.col_offset), offset(lines, node.test.end_lineno, node.test.end_col_offset), "True"


def mutants(rooms):
    """(notebook, number of a cell, its mutated source, line before and after) of all exported cells of the rooms."""
    for room in rooms:
        for book in sorted((root / "nbs" / room).glob("*.ipynb")):
            for i, cell in enumerate(json.loads(book.read_text())["cells"]):
                text = "".join(cell["source"])
                if cell["cell_type"] != "code" or not re.match(r"#\|\s*export", text): continue
                for start, end, new in changes_of(text):
                    changed = text[:start] + new + text[end:]
                    try: ast.parse(changed)
                    except SyntaxError: continue
                    line = text[:start].count("\n")
                    if re.match(r"\s*(if .*: )?raise|.*#\|", text.splitlines()[line]) and start > text.find("raise"): continue   # the words of a message
                    yield book.relative_to(root), i, changed, text.splitlines()[line].strip(), changed.splitlines()[line].strip()


def tests_of(module, n):
    """The `n` test files that name most often something public of a module, those that take seconds first."""
    found = re.search(r"__all__ = \[(.*?)\]", (root / "fasterai_sens" / f"{module.replace('.', '/')}.py").read_text(), re.S)
    names = re.findall(r"'(\w+)'", found[1]) if found else []
    if not names: return []
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    counts = {p: len(pattern.findall(p.read_text())) for p in (root / "tests").glob("test_*.py") if p.name not in ("test_structure.py", "test_readme.py")}
    most = sorted((p for p in counts if counts[p]), key=counts.get)[-n:]
    return sorted(most, key=lambda p: p.stat().st_size)


def in_package(text, cell_id, source, changed):
    """The generated module with the same line changed as in the cell."""
    at = next(i for i, (x, y) in enumerate(zip(source.splitlines(), changed.splitlines(), strict=True)) if x != y)
    old, new = source.splitlines()[at], changed.splitlines()[at]
    nth = source.splitlines()[:at].count(old)
    start = text.index(f"#{cell_id}\n")
    for _ in range(nth + 1): start = text.index(f"\n{old}\n", start) + 1
    return text[:start] + new + text[start + len(old):]


def fails(copy, seconds, *command):
    """Whether a command fails in the copy, or never ends."""
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try: return subprocess.run([sys.executable, *command], cwd=copy, capture_output=True, timeout=seconds, env=env).returncode != 0
    except subprocess.TimeoutExpired: return True


def killed_by(copy, book, cell, changed, seconds, n_tests):
    """What fails with the mutated cell: its notebook, the tests that name something of its module, or nothing."""
    path, content = copy / book, json.loads((copy / book).read_text())
    source = "".join(content["cells"][cell]["source"])
    module = next(m[1] for c in content["cells"] if (m := re.search(r"default_exp\s+(\S+)", "".join(c["source"]))))
    generated = copy / "fasterai_sens" / f"{module.replace('.', '/')}.py"
    kept = {file: file.read_text() for file in (path, generated)}
    generated.write_text(in_package(kept[generated], content["cells"][cell]["id"], source, changed))
    content["cells"][cell]["source"] = changed.splitlines(keepends=True)
    path.write_text(json.dumps(content))
    tests = [f"tests/{test.name}" for test in tests_of(module, n_tests)]
    try:
        if fails(copy, seconds, "-c", f"import sys; from nbdev.test import test_nb; sys.exit(not test_nb('{book}')[0])"): return "notebook"
        if tests and fails(copy, seconds, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests): return "tests"
        return None
    finally:
        for file, text in kept.items(): file.write_text(text)


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--rooms", nargs="+", default=["core", "plans", "measure"])
    parse.add_argument("--n", type=int, default=60, help="mutants, drawn at random")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--seconds", type=int, default=600, help="most for one notebook or test file")
    parse.add_argument("--tests", type=int, default=4, help="most test files for one mutant, those that name its module most")
    args = parse.parse_args()
    everything = list(mutants(args.rooms))
    drawn = random.Random(args.seed).sample(everything, min(args.n, len(everything)))
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".ipynb_checkpoints"))
        (copy / ".venv").symlink_to(root / ".venv")
        for n, (book, cell, changed, old, new) in enumerate(drawn, 1):
            by = killed_by(copy, book, cell, changed, args.seconds, args.tests)
            killed += by is not None
            print(f"{n:3}/{len(drawn)} {by or 'SURVIVED':20} {book} cell {cell}\n      - {old}\n      + {new}", flush=True)
    print(f"{killed} of {len(drawn)} killed ({100*killed/len(drawn):.0f} %), drawn from {len(everything)} in {', '.join(args.rooms)}")


if __name__ == "__main__": main()
