"""Files of results and plans: what an earlier version wrote, files that someone damaged, and names that would act elsewhere."""
import csv
import json
import random
import re
import tracemalloc
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

from fasterai_sens.all import (
    BitPlan,
    ChannelDependency,
    DegradationResult,
    LayerTargets,
    Plan,
    RecoveryResult,
    SearchResult,
    SensitivityAnalyzer,
    SensitivityResult,
    SweepResult,
    analyze_degradation,
    search_plan,
)
from fasterai_sens.compat.nni import SensitivityAnalysis
from fasterai_sens.plans.verdicts import Validation

folder = Path(__file__).parent/"files_0_1"
kinds = dict(result=SensitivityResult, sweep=SweepResult, targets=LayerTargets, bits=BitPlan, plan=Plan, search=SearchResult, search_plan=SearchResult,
    degradation=DegradationResult, recovery=RecoveryResult, validation=Validation)


def look(x):
    """All that shows it in words and tables works"""
    if isinstance(x, SweepResult) and not x.results: return   # of no level, so nothing to show
    repr(x)
    for name in ("summary", "to_dataframe", "top", "_repr_html_", "levels"):
        shown = getattr(x, name, None)
        if callable(shown): shown()


@pytest.mark.parametrize("name", kinds)
def test_files_of_the_first_version(name, tmp_path, capsys):
    """Each is read, has its numbers, and is written again to be read equal."""
    saved = kinds[name].from_json(folder/f"{name}.json")
    assert type(saved) is kinds[name]
    look(saved)
    saved.to_json(tmp_path/"again.json")
    again = kinds[name].from_json(tmp_path/"again.json")
    assert again == saved

    old = (folder/f"{name}.json").read_text()
    new = (tmp_path/"again.json").read_text()
    def numbers(text): return {round(float(n), 9) for n in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)}
    assert numbers(old) and numbers(old) <= numbers(new)


def mend(value, rng):
    """Another value in the place of this one, mostly of another kind"""
    odd = [None, True, -1, 0, 10**40, 1e308, "NaN", "", "x"*3000, [], {}, [[1]], {"a": {}}, "=1", [value], value]
    return rng.choice(odd)

def damaged(data, rng):
    """The same plain data with one value exchanged, or one entry left out, somewhere deep in it"""
    data = json.loads(json.dumps(data))
    at = data
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys: return data
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < .8:
            at = at[key]
        elif rng.random() < .2:
            del at[key]
            return data
        else:
            at[key] = mend(at[key], rng)
            return data

def torn(text, rng):
    """The same bytes with a piece cut off, written over, doubled or turned"""
    content = bytearray(text.encode())
    at, end = sorted(rng.randrange(len(content)) for _ in range(2))
    act = rng.randrange(4)
    if act == 0: return content[:at]
    if act == 1: content[at:end] = rng.randbytes(min(end - at, 50))
    if act == 2: content[at:at] = content[at:end]*rng.randrange(1, 50)
    if act == 3: content[at] ^= 1 << rng.randrange(8)
    return content


def try_damaged(n, path):
    """How many of `n` damaged files were refused; the others have to be whole enough to be shown"""
    rng = random.Random(n)
    texts = {name: (folder/f"{name}.json").read_text() for name in kinds}
    n_refused = 0
    for _ in range(n):
        name = rng.choice(list(kinds))
        if rng.random() < .5: path.write_text(json.dumps(damaged(json.loads(texts[name]), rng)))
        else: path.write_bytes(torn(texts[name], rng))
        try:
            saved = kinds[name].from_json(path)
        except ValueError as e:
            assert str(path) in str(e) and len(str(e)) < 2000
            n_refused += 1
            continue
        try: look(saved)
        except Exception as e: raise AssertionError(f"{name} was read, and is not whole: {path.read_text()}") from e
    return n_refused

@pytest.mark.parametrize("n", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files(n, tmp_path, capsys):
    """A damaged file is a ValueError that names it, within little memory; what is read all the same can be shown."""
    tracemalloc.start()
    try:
        n_refused = try_damaged(n, tmp_path/"damaged.json")
        _, most = tracemalloc.get_traced_memory()
    finally: tracemalloc.stop()
    assert n/2 < n_refused < n
    assert most < 200*2**20


def put(*path):
    """A change of plain data: the last one at the place that the others lead to"""
    *way, name, value = path
    def change(data):
        for key in way: data = data[key]
        data[name] = value
    return change

def again(*path):
    """A change of plain data: the first entry of a list once more"""
    def change(data):
        for key in path: data = data[key]
        data.append(data[0])
    return change

lies = dict(params=("result", put("layers", 0, "params", -40)), interval=("result", put("layers", 0, "ci", [1, -1])), layer=("result", again("layers")),
    error=("result", put("layers", 0, "stderr", -.1)), samples=("result", put("layers", 0, "n", -1)), level=("result", put("compression_level", "NaN")),
    method=("sweep", put("results", 0, "compression_type", "quantization")), metric=("sweep", put("results", 0, "metric_name", "loss")),
    direction=("sweep", put("results", 1, "higher_is_better", False)), size=("plan", put("costs", {"bytes": -3})))

@pytest.mark.parametrize("name", lies)
def test_files_that_lie(name, tmp_path):
    """Whole, of the right kinds, and such as no measurement gives."""
    kind, change = lies[name]
    data = json.loads((folder/f"{kind}.json").read_text())
    change(data)
    (tmp_path/"lie.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="lie.json is not a complete"): kinds[kind].from_json(tmp_path/"lie.json")

@pytest.mark.parametrize("name", ["targets", "bits"])
def test_a_layer_that_has_two_targets(name, tmp_path):
    """A parser would take the last one, and a reader the first."""
    text = (folder/f"{name}.json").read_text()
    layer = re.search(r'"targets": \{\s*("[^"]+")', text)[1]
    (tmp_path/"two.json").write_text(text.replace('"targets": {', f'"targets": {{{layer}: 7, ', 1))
    with pytest.raises(ValueError, match="stands there twice"): kinds[name].from_json(tmp_path/"two.json")

def test_values_without_end(tmp_path):
    """Three bytes on the disk, a hundred in memory, as often as fits into the largest file that is read."""
    n = 33*2**20
    (tmp_path/"long.json").write_bytes(b'{"kind": "LayerTargets", "targets": [' + b"[],"*n + b"1]}")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="4,194,304 are read"): LayerTargets.from_json(tmp_path/"long.json")
        _, most = tracemalloc.get_traced_memory()
    finally: tracemalloc.stop()
    assert most < 300*2**20


hostile = ["=1+2", "+cmd|' /C calc'!A0", "@SUM(1)", "-2+3", "a,b", 'q"uote', "new\nline", "carriage\rreturn", "tab\there", "<b>bold</b>",
    "</script><script>alert(1)</script>", "$x^$", "$\\frac$", "NaN", "Infinity", '"NaN"', "\x1b[2J", "\u2028", "\u202eleft", "a"*5000, "é日本",
    "null\0byte", " ", "'", "_x", "%s {0}", "\\n"]

@pytest.fixture(scope="module")
def named():
    """A network of layers that are called so, its input and a loss"""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in hostile: model.add_module(name, nn.Linear(3, 3))
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    def loss(model): return ((model(x) - y)**2).mean(1)
    return model, x, loss

def everything(model, x, loss):
    """One of each kind of result about the network"""
    analyzer = SensitivityAnalyzer(model, x, loss, higher_is_better=False, metric_name="loss")
    sparse, bits = analyzer.sweep("sparsity", levels=[30, 60]), analyzer.sweep("quantization", levels=[4, 8])
    return [analyzer.analyze("sparsity", 50), sparse, sparse.to_layer_targets(model, 50), bits.to_bit_plan(model, target_bits=6),
        search_plan(model, x, loss, sparse, "80%", "bytes", evaluations=15),
        analyze_degradation(model, x, loss, [50], "sparsity", higher_is_better=False)]

def test_names_survive(named, tmp_path, capsys):
    """Saved, shown and drawn, whatever a layer is called: equal when read back, one line each, no markup, no formula."""
    for thing in everything(*named):
        thing.to_json(tmp_path/"a.json")
        assert type(thing).from_json(tmp_path/"a.json") == thing
        capsys.readouterr()
        look(thing)
        assert "\x1b" not in capsys.readouterr().out
        html = getattr(thing, "_repr_html_", str)()
        assert "<script" not in html and "<b>bold" not in html
        if not hasattr(thing, "plot"): continue
        figure = np.ravel(thing.plot())[0].figure
        figure.canvas.draw()
        plt.close("all")

acting = "\x1b[2J$\\frac$<script>"   # clears a terminal, is no formula, is a part of a page

def test_names_of_what_is_skipped_and_of_metrics(tmp_path, capsys):
    """They are shown as text, also from a file that somebody sent."""
    model = nn.Sequential()
    model.add_module(acting, nn.LSTM(3, 3))
    model.forward = lambda x: model[0](x)[0]
    analyzer = SensitivityAnalyzer(model, torch.randn(2, 8, 3), lambda model: sum(w.abs().sum().item() for w in model.parameters()), metric_name=acting)
    measured = [analyzer.analyze("sparsity", 50), analyzer.sweep("sparsity", levels=[50, 90]), analyzer.analyze("pruning", 50)]
    assert measured[2].skipped and not measured[2].ranked
    for thing in measured:
        thing.to_json(tmp_path/"sent.json")
        thing = type(thing).from_json(tmp_path/"sent.json")
        look(thing)
        print(thing)
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and r"\x1b[2J" in shown and "<script" not in thing._repr_html_()
        if not (thing.names if isinstance(thing, SweepResult) else thing.ranked): continue
        np.ravel(thing.plot())[0].figure.canvas.draw()
        plt.close("all")

def test_names_in_tables_of_nni(named, tmp_path):
    """Those have the columns of NNI, and cannot act either."""
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("=1+2", nn.Conv2d(1, 4, 3))
            self.add_module("\ud800", nn.Conv2d(4, 2, 3))
        def forward(self, x): return self._modules["\ud800"](self._modules["=1+2"](x))
    model, x = First(), torch.randn(2, 1, 8, 8)
    ChannelDependency(model, x).export(tmp_path/"sets.csv")
    analysis = SensitivityAnalysis(model, lambda: model(x).sum().item(), sparsities=[.5])
    analysis.analysis()
    analysis.export(str(tmp_path/"nni.csv"))
    for name in ("sets.csv", "nni.csv"):
        text = (tmp_path/name).read_text(encoding="utf-8")
        assert "'=1+2" in text and not re.search(r"(^|,)=", text, re.MULTILINE)

def test_names_in_spreadsheets(named, tmp_path):
    """What would be run has an apostrophe in front; everything else is as it was."""
    model, x, loss = named
    analyzer = SensitivityAnalyzer(model, x, loss, higher_is_better=False)
    for thing in (analyzer.analyze("sparsity", 50), analyzer.sweep("sparsity", levels=[50, 90])):
        thing.to_csv(tmp_path/"a.csv")
        with (tmp_path/"a.csv").open(newline="", encoding="utf-8") as f: text = f.read()
        _, *rows = csv.reader(text.splitlines(keepends=True))
        read = [row[0] for row in rows if row]
        assert [name.removeprefix("'") if name != "'" else name for name in read] == [name.replace("\0", "\\x00") for name in hostile]
        assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@", "\t"))]
        assert [cell for row in rows for cell in row if cell.startswith("-")] == [c for row in rows for c in row[1:] if c.startswith("-")]

def test_names_in_a_journal(named, tmp_path):
    """Measured once, found again."""
    model, x, loss = named
    calls = []
    def counted(model):
        calls.append(1)
        return loss(model)
    found = []
    for _ in range(2):
        analyzer = SensitivityAnalyzer(model, x, counted, higher_is_better=False, metric_name="loss", reuse=False)
        found.append(analyzer.sweep("sparsity", levels=[50], journal=tmp_path/"j.jsonl"))
        calls.append(0)
    assert found[0] == found[1]
    first, second = "".join(map(str, calls)).split("0")[:2]
    assert len(first) > len(hostile) and len(second) < 4
