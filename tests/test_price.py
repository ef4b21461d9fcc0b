"""An analysis costs what its units weigh, and still no row notices what an earlier evaluation did."""
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import all_pairs

from fasterai_sens import Quantized, SensitivityAnalyzer, Sparse, changes, fingerprint
from fasterai_sens.core import keeping
from fasterai_sens.core.layers import find_units
from fasterai_sens.methods.sparsify import keep_mask

torch.set_num_threads(1)
x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def network(n=12):
    """Linear layers with batch norm between them"""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(n) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6))))


def score(m):
    """A number"""
    with torch.no_grad():
        return m(x).square().mean().item()


def rows(found):
    """What was measured"""
    return [(r.name, r.compressed_metric) for r in found.layers if r.prunable]


def leaves_training_mode(m):
    """Statistics move from then on"""
    m.train()
    m(x)


def goes_half(m):
    """The next input would be of another type"""
    m[4].half().float()
    m[1].eps = 1.0


def adds_a_hook(m):
    """Outputs double"""
    m[3].register_forward_hook(lambda m, args, out: 2*out)


@pytest.mark.parametrize("late,method,at", all_pairs([leaves_training_mode, goes_half, adds_a_hook], ["sparsity", "quantization", "pruning"], [1, 2, 6, 9, 13]))
def test_what_an_evaluation_leaves_behind_late_reaches_no_other_row(late, method, at):
    """Whichever evaluation begins with it, the rows are those of a tidy one, and the model comes back"""
    model, calls = network(), []
    before = fingerprint(model)
    level = 3 if method == "quantization" else 50
    expected = rows(SensitivityAnalyzer(model, x, score, reuse=False).analyze(method, level, verbose=False))

    def eval_fn(m):
        calls.append(1)
        value = score(m)
        if len(calls) == at:
            late(m)
        return value

    assert rows(SensitivityAnalyzer(model, x, eval_fn, reuse=False).analyze(method, level, verbose=False)) == expected
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("most", [0, 2**24])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_weights_come_back_from_memory_and_from_a_file(monkeypatch, most, at):
    """Also after a writing past PyTorch's count, in one evaluation of many"""
    monkeypatch.setattr(keeping, "most_in_memory", most)
    model, calls = network(), []
    before = fingerprint(model)

    def eval_fn(m):
        calls.append(1)
        if len(calls) == at:
            m[8].weight.detach().numpy()[:] += 1
        return score(m)

    with pytest.raises(ValueError, match=r"changed the weights of the model \(8.weight\)"):
        SensitivityAnalyzer(model, x, eval_fn, reuse=False).analyze(verbose=False)
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("at", [1, 2, 6, 9])
def test_statistics_written_past_the_count_reach_no_other_row(at):
    """Buffers are put back where PyTorch counts a change; other changes are looked for, and all is measured again"""
    def moves(m):
        calls.append(1)
        value = score(m)
        if len(calls) >= at:
            m[5].running_var.data.add_(1)
        return value

    model, calls = network(), []
    before = fingerprint(model)
    expected = rows(SensitivityAnalyzer(model, x, score, reuse=False).analyze("quantization", 3, verbose=False))
    assert rows(SensitivityAnalyzer(model, x, moves, reuse=False).analyze("quantization", 3, verbose=False)) == expected
    assert changes(before, fingerprint(model)) == []


layouts = dict(
    plain=lambda w: w, channels_last=lambda w: w.contiguous(memory_format=torch.channels_last), ties=lambda w: w.mul(20).round(),
    undefined=lambda w: w.masked_fill(w > 1, float("nan")), infinite=lambda w: w.div(w.abs().gt(1)), half=lambda w: w.half(),
    transposed=lambda w: w.transpose(0, 1))


@pytest.mark.parametrize("layout", layouts)
@pytest.mark.parametrize("pct", [.01, 50, 99.9, 100])
def test_the_short_way_to_zeros_ends_at_the_same_bits(layout, pct):
    """As a mask of all magnitudes, where every number is looked at as a score"""
    w = layouts[layout](torch.randn(96, 64, 5, 5, generator=torch.Generator().manual_seed(0)))
    conv = nn.Conv2d(64, 96, 5, dtype=w.dtype)
    conv.weight = nn.Parameter(w)
    expected = w.where(keep_mask(w.float().abs(), pct), torch.zeros((), dtype=w.dtype))
    with Sparse(pct)(conv, find_units(conv)[0][0]):
        assert conv.weight.stride() == w.stride()
        assert torch.equal(conv.weight.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert torch.equal(conv.weight.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8))


class Walked(nn.Sequential):
    """Counts how often somebody goes through all of its modules"""

    walks = 0

    def named_modules(self, *args, **kwargs):
        """As ever"""
        self.walks += 1
        return super().named_modules(*args, **kwargs)


@pytest.mark.parametrize("method", [Quantized(4), Sparse(50)])
def test_a_unit_does_not_pay_for_the_others(method):
    """Four times the layers are four times the evaluations, and no more walks through the model"""
    def walks(n):
        torch.manual_seed(0)
        model, calls = Walked(*(nn.Linear(6, 6) for _ in range(n))), []
        analyzer = SensitivityAnalyzer(model, x, lambda m: float(calls.append(1) or len(calls)), reuse=False)
        model.walks = 0
        analyzer.analyze(method, verbose=False)
        assert len(calls) == n + 1
        return model.walks

    assert walks(100) == walks(25) < 25   # with one walk for each unit it would be 75 more


class Waits(TorchDispatchMode):
    """Counts the operations whose result the CPU reads, for which a GPU has to finish what it was given"""
    names = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount"}

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket.__name__ in self.names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["sparsity", "quantization"])
def test_waits_for_the_device_are_those_of_the_unit(method):
    """Three for its scores or ranges, and two each for weight and bias, whether anybody wrote to them: layers that are not measured cost none"""
    def count(n):
        free = iter(range(1000))
        analyzer = SensitivityAnalyzer(network(n), x, lambda m: float(next(free)), reuse=False)
        layers = [u.name for u in analyzer.units][:4]
        waits = []
        for some in (layers[:2], layers):
            with Waits() as counter: analyzer.analyze(method, layers=some, verbose=False)
            waits.append(counter.n)
        return (waits[1] - waits[0])/2
    assert count(6) == count(18) <= 7
