"""Generated networks: whatever is connected with whatever, nothing is left behind, what is measured is what is applied, and reuse changes no bit.

`pytest -m slow tests/test_generated.py` goes through a thousand of them; the fast part takes a few. `python tests/test_generated.py` prints what they are
made of.
"""

import copy
import math
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from toys import lively, unchanged

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.core.plans import LayerTargets
from fasterai_sens.core.protocol import methods

LEVELS = dict(sparsity=50, quantization=3, pruning=40, low_rank=60)


class Generated(nn.Module):
    """A network from a list of `(kind, number)`; the number chooses widths, groups, and which earlier tensor or layer is meant"""

    def __init__(self, steps, named):
        super().__init__()
        self.named, self.layers, self.todo = named, nn.ModuleDict(), []
        self.stem, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(2, 4, 1)
        self.widths = [4]
        for kind, number in steps:
            getattr(self, f"_{kind}")(number)
        self.head = nn.Linear(self.widths[-1], 3)

    def _add(self, layer, way, width, other=None, name=None):
        """Enter a layer and the way in which it is used"""
        name = name or f"{way}{len(self.todo)}"
        if layer is not None:
            self.layers[name] = layer
        self.todo.append((way, name, other))
        self.widths.append(width)

    def _conv(self, i):
        n, groups = self.widths[-1], 2 if i % 3 == 0 and self.widths[-1] % 2 == 0 else 1
        self._add(nn.Conv2d(n, (4, 6, 8)[i % 3], 1 + i % 2 * 2, padding=i % 2, groups=groups, bias=i % 5 > 0), "call", (4, 6, 8)[i % 3])

    def _depthwise(self, i):
        n = self.widths[-1]
        self._add(nn.Conv2d(n, n, 3, padding=1, groups=n), "call", n)

    def _transposed(self, i):
        n, groups = self.widths[-1], 2 if i % 2 and self.widths[-1] % 2 == 0 else 1
        self._add(nn.ConvTranspose2d(n, 6, 3, padding=1, groups=groups), "call", 6)

    def _norm(self, i):
        self._add(nn.BatchNorm2d(self.widths[-1]), "call", self.widths[-1])

    def _act(self, i):
        self._add((nn.ReLU(), nn.GELU(), nn.Sigmoid())[i % 3], "call", self.widths[-1])

    def _residual(self, i):
        n = self.widths[-1]
        self._add(nn.Conv2d(n, n, 3, padding=1), "add", n)

    def _skip(self, i):
        other = i % len(self.widths)
        self._add(nn.Conv2d(self.widths[other], self.widths[-1], 1), "skip", self.widths[-1], other)

    def _concat(self, i):
        other = i % len(self.widths)
        if self.widths[-1] + self.widths[other] <= 24:
            self._add(None, "concat", self.widths[-1] + self.widths[other], other)

    def find_square(self):
        """The convolutions so far that leave the number of channels as it is now; a new one if there is none"""
        n = self.widths[-1]
        known = [m for m, layer in self.layers.items() if isinstance(layer, nn.Conv2d) and (layer.in_channels, layer.out_channels, layer.groups) == (n, n, 1)]
        if not known:
            self._residual(0)
        return known or [self.todo[-1][1]]

    def _again(self, i):
        known = self.find_square()
        self._add(None, "call", self.widths[-1], name=known[i % len(known)])

    def _tied(self, i):
        known = self.find_square()
        first = self.layers[known[i % len(known)]]
        twin = copy.deepcopy(first)
        twin.weight = first.weight
        self._add(twin, "call", self.widths[-1])

    def _attention(self, i):
        n = self.widths[-1]
        if n % 2 == 0:
            self._add(nn.MultiheadAttention(n, 2, batch_first=True), "attend", n)

    def _mixer(self, i):
        self._add(nn.Linear(self.widths[-1], 6), "last", 6)

    def _gate(self, i):
        n = self.widths[-1]
        self._add(nn.Conv2d(n, n, 1), "gate", n)

    def _halves(self, i):
        n = self.widths[-1]
        if n % 2 == 0:
            self._add(nn.Conv2d(n // 2, n // 2, 1), "halves", n)

    def forward(self, left, right=None):
        """Two images, the second one maybe missing"""
        h = self.stem(left) if right is None else self.stem(left) + self.other(right)
        seen = [h]
        for way, name, other in self.todo:
            layer = self.layers[name] if name in self.layers else None
            h = self.step(way, layer, h, None if other is None else seen[other])
            seen.append(h)
        out = self.head(h.mean((2, 3)))
        return dict(logits=out) if self.named else out

    def step(self, way, layer, h, other):
        """One layer in its way"""
        if way == "concat":
            return torch.cat([h, other], 1)
        if way == "add":
            return h + layer(h).relu()
        if way == "skip":
            return h + layer(other)
        if way == "gate":
            return h * layer(h.mean((2, 3), keepdim=True)).sigmoid()
        if way == "halves":
            a, b = h.chunk(2, 1)
            return torch.cat([b, layer(a)], 1)
        if way == "last":
            return layer(h.movedim(1, -1)).movedim(-1, 1)
        if way == "attend":
            tokens = h.flatten(2).transpose(1, 2)
            return h + layer(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).unflatten(2, h.shape[2:])
        return layer(h)


kinds = sorted(n[1:] for n in vars(Generated) if n.startswith("_") and n[1] != "_" and n != "_add")
steps = st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 11)), min_size=2, max_size=8)
inputs = st.sampled_from(["tensor", "tuple", "dict"])


def sample_of(how):
    """The same numbers as one input, as two, or by name"""
    left, right = torch.randn(3, 3, 5, 5), torch.randn(3, 2, 5, 5)
    return dict(tensor=left, tuple=(left, right), dict=dict(left=left, right=right))[how]


def scorer(x):
    """A score for each image, to which every output counts"""

    @torch.no_grad()
    def score(model):
        out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        return (out["logits"] if isinstance(out, dict) else out).double() @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.double)

    return score


def measured(net, x, method, reuse):
    """Scores by layer, reasons by layer"""
    a = SensitivityAnalyzer(net, x, scorer(x), reuse=reuse)
    try:
        r = a.analyze(method, LEVELS[method], verbose=False)
    except ValueError as e:
        return {}, {u.name: str(e) for u in a.units}
    units, reasons = {u.name for u in a.units}, dict(r.skipped)
    return {row.name: row.compressed_metric for row in r.layers if row.name not in reasons}, {n: why for n, why in reasons.items() if n in units}


def check(steps, how, named, seed):
    """All that is promised of a network"""
    torch.manual_seed(seed)
    net, x = lively(Generated(steps, named)), sample_of(how)
    for method, level in LEVELS.items():
        with unchanged(net):
            rows, reasons = measured(net, x, method, reuse=True)
        assert rows.keys() | reasons.keys() == {u.name for u in SensitivityAnalyzer(net, x, scorer(x)).units}
        assert all(math.isfinite(v) for v in rows.values()) and all(reasons.values())
        assert measured(net, x, method, reuse=False) == (rows, reasons), (method, "reuse")
        for name in sorted(rows)[seed % 2 :: 2][:2]:
            twin = copy.deepcopy(net)
            methods[method].apply(twin, LayerTargets({name: level}, "bits" if method == "quantization" else "percent", method), sample=x)
            assert scorer(x)(twin.eval()).mean().item() == pytest.approx(rows[name], abs=1e-5, rel=1e-5), (method, name)


relaxed = dict(deadline=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=12, derandomize=True, **relaxed)
@given(steps, inputs, st.booleans(), st.integers(0, 9))
def test_generated_networks(steps, how, named, seed):
    """A few, the same each time"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(steps, how, named, seed)


def draw(number, look):
    """Show a quarter of a thousand networks to `look`; the same each time, so that one that fails can be looked at"""

    @seed(number)
    @settings(max_examples=250, **relaxed)
    @given(steps, inputs, st.booleans(), st.integers(0, 10**6))
    def quarter(steps, how, named, seed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            look(steps, how, named, seed)

    quarter()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_a_thousand_generated_networks(number):
    """A quarter of them, side by side with the others"""
    draw(number, check)


def made_of(steps, how, named):
    """What a network has, in words"""
    net = Generated(steps, named)
    used = [name for _, name, _ in net.todo]
    weights = [p for m in net.layers.values() for p in m.parameters()]
    convs = [m for m in net.layers.values() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    found = {f"input: {how}", "output: dictionary" if named else "output: tensor"} | {f"way: {way}" for way, _, _ in net.todo}
    found |= {f"layer: {type(m).__name__}" for m in net.layers.values()}
    if len(set(used)) < len(used):
        found.add("a module that is called again")
    if len({id(w) for w in weights}) < len(weights):
        found.add("two modules with one weight")
    if any(1 < m.groups < m.in_channels for m in convs):
        found.add("groups")
    if any(m.groups == m.in_channels for m in convs):
        found.add("depthwise")
    return found


def count():
    """How many of the thousand have what"""
    found = Counter()
    for number in range(4):
        draw(number, lambda steps, how, named, seed: found.update([*made_of(steps, how, named), "all"]))
    return found


def test_what_the_thousand_are_made_of():
    """None of the promised kinds is rare among them"""
    found = count()
    assert found["all"] == 1000
    few = {what: n for what, n in found.items() if n < 100 and "layer" not in what}
    assert not few and {"way: add", "way: skip", "way: concat", "way: attend", "groups", "depthwise", "a module that is called again"} < found.keys()
    assert found["layer: ConvTranspose2d"] > 100 and found["two modules with one weight"] > 100


if __name__ == "__main__":
    for what, n in sorted(count().items(), key=lambda item: -item[1]):
        print(f"{n:5} {what}")
