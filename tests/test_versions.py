"""What may differ from one version of a library to the next: requirements, private parts, autograd's graph."""

import inspect
import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import nn
from toys import Net
from transformers.pytorch_utils import Conv1D

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.measure.traces import missing_parts
from fasterai_sens.methods.channels import trace
from fasterai_sens.methods.proof import channel_groups

root = Path(__file__).parent.parent


def requirements(section):
    """The lines of one list of requirements in settings.ini."""
    ini = ConfigParser()
    ini.read(root / "settings.ini")
    return ini["DEFAULT"][section].split()


@pytest.mark.parametrize("section", ["requirements", "torchao_requirements", "tutorials_requirements", "dev_requirements"])
def test_every_requirement_has_a_lower_bound(section):
    """`make oldest` installs exactly these."""
    for line in requirements(section):
        assert re.fullmatch(r"[A-Za-z0-9-]+>=[0-9.]+(,<[0-9.]+)?", line), line


def test_torch_pruning_has_an_upper_bound():
    """Its private parts are replaced, so a version that was not tried is not taken."""
    assert any(re.fullmatch(r"torch-pruning>=[\d.]+,<[\d.]+", line) for line in requirements("requirements"))


def changed(part):
    """What to say when a private part is not as it was."""
    return f"torch-pruning {tp.__version__} changed {part}, which `nbs/06_channels.ipynb` builds on: read it there, and mend"


def test_private_parts_of_pytorch():
    """What reuse takes from PyTorch although it is not documented."""
    assert missing_parts() == [], "this PyTorch has moved what reuse is built on, so nothing is reused: see measure/10_traces"


def test_without_private_parts_of_pytorch(monkeypatch):
    """Where they are gone, every evaluation is plain, and the report says so."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).eval(), torch.randn(9, 4)

    @torch.no_grad()
    def outputs(model): return model(x)[:, 0]

    plain, reusing = (SensitivityAnalyzer(net, x[:1], outputs, reuse=how) for how in (False, True))
    expected = plain.sweep(levels=[25, 50], verbose=False)
    assert reusing.sweep(levels=[25, 50], verbose=False) == expected and reusing.reuse_report.n_reused
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert reusing.sweep(levels=[25, 50], verbose=False) == expected
    assert repr(reusing.reuse_report) == "nothing reused: this version of PyTorch has no _storage_Use_Count"


def test_private_parts_of_torch_pruning():
    """Everything of torch-pruning that is used although it is not documented, by one network."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    build = inspect.signature(tp.DependencyGraph.build_dependency).parameters
    assert {"forward_fn", "customized_pruners", "verbose"} <= set(build), changed("build_dependency")
    graph = tp.DependencyGraph().build_dependency(net, torch.randn(1, 3, 4, 4), verbose=False)
    assert isinstance(graph.module2node, dict) and {net[0], net[3]} <= set(graph.module2node), changed("module2node")
    node = graph.module2node[net[0]]
    assert all(isinstance(e.index_mapping, list) for e in node.dependencies), changed("the edges' index_mapping")
    assert {net[1]} == {n.module for n in node.outputs}, changed("the nodes' outputs")
    assert (graph.get_out_channels(node), graph.get_in_channels(node)) == (4, 3), changed("the counts of channels")
    prune = graph.get_pruner_of_module(net[0]).prune_out_channels
    items = graph.get_pruning_group(net[0], prune, [1, 2]).items
    found = {i.dep.target.module: (list(i.idxs), list(i.root_idxs)) for i in items}
    for module in (net[0], net[1], net[3]):
        assert found.get(module) == ([1, 2], [1, 2]), changed("the items of a group")
    outward = {i.dep.target.module for i in items if graph.is_out_channel_pruning_fn(i.dep.handler)}
    assert net[0] in outward and net[3] not in outward, changed("is_out_channel_pruning_fn")


def test_the_search_goes_through_the_replaced_parts():
    """The walk that ends a search without end is called, and the nodes are looked up but never gone through."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = trace(net, torch.randn(2, 3))
    assert list(graph.module2node.items()) == [] and len(graph.module2node.values()) > 0
    calls = []
    for node in graph.module2node.values():
        for edge in node.dependencies:
            edge.index_mapping.append(lambda idxs: calls.append(len(idxs)) or idxs)
    graph.get_pruning_group(net[0], graph.get_pruner_of_module(net[0]).prune_out_channels, [0])
    assert calls, changed("how a search maps channel numbers")


# ---- the graph is the model's


def linear_3d(act):
    """Linear layers on sequences."""
    return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 4)), torch.randn(2, 5, 6)


def linear_4d(act):
    """Linear layers on a grid, without bias."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), act, nn.Linear(8, 4)), torch.randn(1, 3, 5, 6)


def transposed_linear(act):
    """The input is no contiguous tensor."""
    return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 4)), torch.randn(2, 6, 5).transpose(1, 2)


def flattened(act):
    """What is written to is the flattened view of a convolution."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), act, nn.Linear(8 * 36, 4)), torch.randn(2, 3, 8, 8)


def unbatched(act):
    """A convolution of one sample without a batch."""
    return nn.Sequential(nn.Conv1d(6, 8, 1), act, nn.Conv1d(8, 4, 1)), torch.randn(6, 5)


def hugging_face(act):
    """GPT-2's layer, whose output is a view."""
    return nn.Sequential(Conv1D(8, 6), act, Conv1D(4, 8)), torch.randn(2, 5, 6)


def from_buffer(act):
    """The input of a small network inside is a buffer, as in Swin V2's table of positions."""
    net = Net(
        lambda m, x: m.head(x) + m.table(m.places).mean((0, 1, 2)), table=linear_4d(act)[0], head=nn.Linear(6, 4)
    )
    net.register_buffer("places", torch.randn(1, 3, 3, 6))
    return net, torch.randn(2, 6)


def added_in_place(act):
    """A view to which the output of another layer is added."""

    def run(m, x):
        y = m.a(x)
        y += m.b(x)
        return m.head(act(y))

    return Net(run, a=nn.Linear(6, 8), b=nn.Linear(6, 8), head=nn.Linear(8, 4)), torch.randn(2, 5, 6)


class Act(nn.Module):
    """An activation by its function."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


IN_PLACE = {
    "module": lambda: nn.ReLU(inplace=True),
    "positional": lambda: nn.LeakyReLU(0.1, True),
    "function": lambda: Act(lambda x: F.relu(x, inplace=True)),
    "method": lambda: Act(lambda x: x.relu_()),
}


def found(make, act):
    """The groups: names of their layers, number of granules, reason."""
    torch.manual_seed(0)
    net, x = make(act)
    return [([u.name for u in g.units], None if g.reason else len(g.granules), g.reason) for g in channel_groups(net.eval(), x)]


@pytest.mark.parametrize("act", IN_PLACE)
@pytest.mark.parametrize("make", [linear_3d, linear_4d, transposed_linear, flattened, unbatched, hugging_face, from_buffer, added_in_place])
def test_in_place_hides_no_layer(make, act):
    """The same groups as with an activation that writes nowhere, and the first layer can be pruned."""
    expected = found(make, nn.ReLU())
    assert expected[0][1] == 8, expected
    assert found(make, IN_PLACE[act]()) == expected
