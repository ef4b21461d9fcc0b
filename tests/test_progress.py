"""Bars: for all that may be long, one at a time, none where verbose is off, nothing for what is short."""
import pytest
import torch
from torch import nn

from fasterai_sens import (
    Applier,
    Pruner,
    SensitivityAnalyzer,
    allocate,
    analyze_degradation,
    compress_to_size,
    compress_with_layer_sensitivity,
    cost_table,
    latency,
    search_plan,
)
from fasterai_sens.core import progress
from fasterai_sens.core.progress import report, slow_bar
from fasterai_sens.methods.proof import channel_groups

g = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def case():
    """A small network, images, an eval_fn, and a sweep over channels."""
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)).eval(), torch.randn(8, 3, 8, 8, generator=g)
    with torch.no_grad(): start = model(images)
    moved = torch.inference_mode()(lambda m: (m(images) - start).square().mean(1).clone())
    return model, images[:1], moved, SensitivityAnalyzer(model, images[:1], moved, higher_is_better=False).sweep("pruning", [25, 50], verbose=False)


works = {
    "allocate": lambda model, x, eval_fn, sweep, **v: allocate(sweep, "70%", "flops", model=model, sample=x, **v),
    "cost_table": lambda model, x, eval_fn, sweep, **v: cost_table(sweep, model, x, **v),
    "search_plan": lambda model, x, eval_fn, sweep, **v: search_plan(model, x, eval_fn, sweep, "70%", evaluations=7, **v),
    "compress_to_size": lambda model, x, eval_fn, sweep, **v: compress_to_size(model, x, 50, **v),
    "compress_with_layer_sensitivity": lambda model, x, eval_fn, sweep, **v: compress_with_layer_sensitivity(model, x, sweep, 30, **v),
    "analyze_degradation": lambda model, x, eval_fn, sweep, **v: analyze_degradation(model, x, eval_fn, (80, 50), higher_is_better=False, runs=1, **v),
    "analyze": lambda model, x, eval_fn, sweep, **v: SensitivityAnalyzer(model, x, eval_fn, higher_is_better=False).analyze("pruning", 50, **v),
    "Pruner": lambda model, x, eval_fn, sweep, **v: Pruner(model, 50, example_inputs=x, **v),
    "channel_groups": lambda model, x, eval_fn, sweep, **v: channel_groups(model, x, **v),
    "latency": lambda model, x, eval_fn, sweep, **v: latency(model, x, **v)}


@pytest.mark.parametrize("name", works)
def test_a_bar_for_what_may_be_long(name, case, capsys, monkeypatch):
    """As if two seconds were over at once: the call shows how far it is, and with verbose=False it prints nothing."""
    monkeypatch.setattr(progress, "patience", 0.)
    works[name](*case)
    assert "%" in capsys.readouterr().out
    works[name](*case, verbose=False)
    assert capsys.readouterr() == ("", "")
    assert not progress._open


@pytest.mark.parametrize("name", ["allocate", "cost_table", "compress_to_size", "Pruner", "channel_groups", "latency"])
def test_short_work_prints_nothing(name, case, capsys, monkeypatch):
    """Below two seconds there is no bar."""
    monkeypatch.setattr(progress, "patience", 60.)
    works[name](*case)
    assert capsys.readouterr() == ("", "")


def test_one_bar_at_a_time(case, capsys, monkeypatch):
    """What is inside speaks through the bar around it; after an exception the next bar is free."""
    monkeypatch.setattr(progress, "patience", 0.)
    model, x, _, _ = case
    with slow_bar(2, text="outside") as tick:
        channel_groups(model, x)
        tick()
    assert "[2/2" in (out := capsys.readouterr().out) and "[1/1" not in out
    with pytest.raises(KeyboardInterrupt), slow_bar(2):
        raise KeyboardInterrupt
    assert not progress._open
    report("nobody listens")
    with slow_bar(verbose=False): Applier(model, x, ("pruning",))
    assert capsys.readouterr() == ("", "")
