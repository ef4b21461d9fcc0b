"""A method that a user writes in a few lines outside the package works wherever one of ours does."""
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from toys import rows, three_layers, unchanged

from fasterai_sens import (
    Perturbation,
    Plan,
    SensitivityAnalyzer,
    allocate,
    analyze_degradation,
    compress_to_size,
    compress_with_layer_sensitivity,
    cost_table,
    method,
    recommend_compression_target,
    search_plan,
)
from fasterai_sens.core.layers import target_units
from fasterai_sens.core.protocol import methods

x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
score = rows(x)


@pytest.fixture(autouse=True)
def rounding():
    """The fifth method: it drops the last bits of each number's mantissa, and holds that while training"""
    before = dict(methods)

    class Held:
        def __init__(self, levels): self.levels = levels
        def hold(self):
            for unit, level in self.levels.items(): Rounded(level).change(None, unit)

    @method("rounding")
    @dataclass(frozen=True)
    class Rounded(Perturbation):
        level: float = 50   # percent of the 23 bits
        ranks = False
        @property
        def n_bits(self): return round(23*self.level/100)
        def change(self, model, unit):
            bits = unit.weight.data.view(torch.int32)
            bits &= -2**self.n_bits
        def shrink(self, unit, footprint, n_biases=0): return replace(footprint, bits=footprint.bits - self.n_bits)
        @classmethod
        def apply(cls, model, targets, **_):
            held = Held(target_units(model, targets))
            held.hold()
            return held

    yield Rounded
    del methods["rounding"]
    assert methods == before
