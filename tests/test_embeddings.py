"""Tables of embeddings: measured, planned for, rounded, factorized and trained like other weights, and tied to their heads."""
import math
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn, tensor
from toys import Net

from fasterai_sens import LayerTargets, Pruner, SensitivityAnalyzer, Sparsifier, allocate, count_flops_params, evaluation, quantize_model, taylor, wanda
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.protocol import methods
from fasterai_sens.plans.applier import Applier

transformers = pytest.importorskip("transformers")
low_rank = methods["low_rank"]   # by its name, since a method may be taken out


def speaker(seed=0, **options):
    """A language model of six layers whose head is its table"""
    torch.manual_seed(seed)
    net = Net(lambda m, ids: m.head(m.mid(m.words(ids)).tanh() + m.words(ids)), words=nn.Embedding(40, 16, padding_idx=0, **options),
              mid=nn.Linear(16, 16), head=nn.Linear(16, 40))
    net.head.weight = net.words.weight
    with torch.no_grad():
        net.words.weight[0] = 0
    return net.eval()


ids = torch.randint(1, 40, (12, 5), generator=torch.Generator().manual_seed(1))


def scored(net):
    """Log-likelihood of each sequence"""
    with torch.no_grad():
        out = net(ids)
    out = getattr(out, "logits", out)
    return out.log_softmax(-1).gather(2, ids[:, :, None]).mean((1, 2))


def hugging_face():
    """Models from configs, with the names of their tables and of what each is tied to"""
    small = dict(vocab_size=40, d_model=16)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    bert = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, max_position_embeddings=8))
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(
        **small, d_ff=24, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0))
    return {
        "gpt2": (gpt2, dict(input_ids=ids), {"lm_head", "transformer.wte"}),
        "bert": (bert, dict(input_ids=ids), {"cls.predictions.decoder", "bert.embeddings.word_embeddings"}),
        "t5": (t5, dict(input_ids=ids, decoder_input_ids=ids), {"lm_head", "shared", "encoder.embed_tokens", "decoder.embed_tokens"}),
    }


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_tied_tables_of_hugging_face(name):
    """One unit, one cost, one rounding; factorized, the head stays tied and answers what was measured; all methods measure them"""
    torch.manual_seed(0)
    net, sample, tied = hugging_face()[name]
    net.eval()
    before = fingerprint(net)
    unit = next(u for u in all_units(net)[0] if tied & set(u.members))
    assert set(unit.members) == tied and unit.multiplying
    with torch.no_grad():
        whole = net(**sample).logits

    def eval_fn(m):
        with torch.no_grad():
            return (m(**sample).logits - whole).square().mean((1, 2))
    analyzer = SensitivityAnalyzer(net, sample, eval_fn, higher_is_better=False)
    for method, level in (("sparsity", 50), ("quantization", 3), ("low_rank", 50)):
        result = analyzer.analyze(method, level, verbose=False)
        [row] = [r for r in result.layers if r.name == unit.name]
        assert row.delta > 0 and set(row.group_members) == tied, method
    assert "transformer.wpe" in {r.name for r in result.layers} or name != "gpt2"
    assert changes(before, fingerprint(net)) == []
    with quantize_model(net, {unit.name: 4}) as applied:
        assert applied.size_bytes < sum(p.numel() for p in net.parameters()) * 4
        assert len({m.weight.data_ptr() for m in unit.modules}) == 1
        assert all(len(row.unique()) <= 16 for row in unit.weight)   # a scale for each row
        with pytest.raises(ValueError):
            quantize_model(net, {unit.name: 4})
    with low_rank(60)(net, unit), torch.no_grad():
        expected = net(**sample).logits
    small = low_rank.apply(net, {unit.name: 60}, sample=sample)
    with torch.no_grad():
        assert torch.allclose(net(**sample).logits, expected, atol=1e-5)
    factors = [p for pair in small.pairs.values() for p in (pair[0].weight, pair[1].weight)]
    assert len({id(p) for p in factors}) == 2   # one pair of parameters for all of them
    small.remove()
    assert net.get_parameter(f"{unit.name}.weight").data_ptr() == before["parameters"][f"{unit.name}.weight"][5][0]


def test_tied_head_stays_tied_in_training():
    """Factorized, table and head share two parameters; a step of Adam moves both, and padding stays zero"""
    net = speaker()
    low_rank.apply(net, {"words": 60}, sample=ids)
    params = list(net.parameters())
    assert len(params) == len({p.data_ptr() for p in params}) == 5
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    assert net.words[0].weight is net.head[1].weight and net.words[1].weight is net.head[0].weight
    assert torch.equal(net.words.weight, net.head.weight)
    unit = next(u for u in all_units(net)[0] if "words.0" in u.members)
    assert unit.members == ("head.1", "words.0")


def test_padding_counts_as_the_zeros_it_is():
    """A row of zeros is the first to go, so a share of a table has it; rounding and factors leave it at zero"""
    net = speaker()
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    masks = Sparsifier(net)
    masks.sparsify_model({"words": 10})
    assert not masks.masks["words"][0].any() and int((net.words.weight == 0).sum()) == 64
    rows = Sparsifier(speaker(), granularity="row")
    rows.sparsify_model({"words": 5})
    assert (~rows.masks["head"].any(1)).nonzero().flatten().tolist()[0] == 0 and int((~rows.masks["head"].any(1)).sum()) == 2
    with quantize_model(net, {"words": 2}):
        assert not net.words.weight[0].any()
    low_rank.apply(net, {"words": 50})
    assert not net.words(tensor([0])).any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode):
    """Offsets and weights of rows reach the short table; where a maximum is taken it is refused, and a bag computes nothing that is counted"""
    torch.manual_seed(0)
    rows, offsets = torch.randint(0, 30, (40,)), torch.arange(0, 40, 4)
    by = torch.rand(40) if mode == "sum" else None
    net = Net(lambda m, rows, offsets: m.head(m.bag(rows, offsets, per_sample_weights=by)), bag=nn.EmbeddingBag(30, 12, mode=mode), head=nn.Linear(12, 3)).eval()
    sample = rows, offsets
    macs, _, _ = count_flops_params(net, (rows, offsets), verbose=False)
    assert macs == round(10 * 36 / 40)   # of the head alone, for one of 40 numbers
    with torch.no_grad():
        whole = net(*sample)

    def eval_fn(m):
        with torch.no_grad():
            return (m(*sample) - whole).square().mean(1)
    analyzer = SensitivityAnalyzer(net, sample, eval_fn, higher_is_better=False)
    for method, level in (("sparsity", 50), ("quantization", 3)):
        assert analyzer.analyze(method, level, verbose=False).layers[0].delta > 0
    result = analyzer.analyze("low_rank", 50, verbose=False)
    if mode == "max":
        assert "largest of several rows" in dict(result.skipped)["bag"]
        return
    unit = all_units(net)[0][0]
    with low_rank(50)(net, unit), torch.no_grad():
        expected = net(*sample)
    low_rank.apply(net, {"bag": 50}, sample=sample)
    with torch.no_grad():
        assert torch.allclose(net(*sample), expected, atol=1e-6)


def test_max_norm_is_not_written():
    """Its forward shortens rows in place: in a measurement it reads from a copy, every method but low rank measures it"""
    net = speaker(max_norm=1.0)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    alike = speaker(max_norm=1.0)
    alike.head.weight = nn.Parameter(alike.head.weight.detach().clone())
    before = fingerprint(net)
    analyzer = SensitivityAnalyzer(net, ids[:1], scored)
    result = analyzer.analyze("sparsity", 60, verbose=False)
    assert result.baseline_metric == pytest.approx(float(scored(alike).mean()), abs=1e-7)
    with torch.no_grad():
        words = alike.words.weight.data
        words.copy_(net.words.weight)
        Sparsifier(alike).sparsify_model({"words": 60})
    assert result.layers[0].name == "words" and result.layers[0].compressed_metric == pytest.approx(float(scored(alike).mean()), abs=1e-6)
    assert "max_norm" in dict(analyzer.analyze("low_rank", 50, verbose=False).skipped)["words"]
    count_flops_params(net, ids, verbose=False)
    assert changes(before, fingerprint(net)) == []


@pytest.mark.parametrize("by", ["fisher", "taylor", "output_error"])
def test_estimates_with_sparse_gradients(by):
    """Sparse and dense gradients give the same estimate, and it ranks a table that matters above one that is never read"""
    def estimate(sparse):
        net = speaker(sparse=sparse)
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
        net.idle = nn.Embedding(9, 4, sparse=sparse)
        data = evaluation((ids, ids), lambda preds, y: -F.cross_entropy(preds.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1))
        return SensitivityAnalyzer(net, ids[:1], data).estimate("sparsity", [50, 80], by=by, verbose=False)
    sparse, dense = estimate(True), estimate(False)
    for a, b in zip(sparse[1].layers, dense[1].layers, strict=True):
        assert a.name == b.name and a.delta == pytest.approx(b.delta, rel=1e-4, abs=1e-9)
    found = {r.name: r.delta for r in sparse[1].layers}
    assert found["words"] != 0 and found["idle"] == 0


def test_criteria_that_use_data():
    """wanda drops entries that are never looked up, taylor those without gradients, with sparse gradients too"""
    net = speaker(sparse=True)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    seen = ids % 20 + 1
    for criterion in (wanda, taylor):
        masks = Sparsifier(net, criteria=criterion, calibration_data=[(seen, seen)], sample=seen)
        masks.set_levels({masks.units[0]: 60})
        assert not masks.masks["words"][21:].any() and masks.masks["words"][1:21].any()


def test_pruning_takes_columns_with_the_layers_that_add_to_rows():
    """A table loses columns with the layer whose output is added to its rows, and is no group of its own"""
    torch.manual_seed(0)
    net = Net(lambda m, ids: m.head(m.norm(m.words(ids) + m.back(m.inner(m.words(ids)).relu()))), words=nn.Embedding(40, 16),
              inner=nn.Linear(16, 24), back=nn.Linear(24, 16), norm=nn.LayerNorm(16), head=nn.Linear(16, 7)).eval()
    result = SensitivityAnalyzer(net, ids, lambda m: float(m(ids).detach().square().mean())).analyze("pruning", 50, verbose=False)
    assert "only together with layers" in dict(result.skipped)["words"]
    Pruner(net, LayerTargets({"back": 50}, method="pruning"), example_inputs=ids).prune_model()
    assert net.words.weight.shape == (40, 8) and net(ids).shape == (12, 5, 7)


def test_training_holds_tables():
    """Callbacks hold zeros and grids of a table whose gradients are sparse"""
    from fastai.learner import DataLoaders, Learner

    from fasterai_sens.train.quantize_callback import QuantizeCallback
    from fasterai_sens.train.schedules import one_shot
    from fasterai_sens.train.sparsify_callback import SparsifyCallback
    for callback in (SparsifyCallback({"words": 50}, schedule=one_shot), QuantizeCallback({"words": 3})):
        net = speaker(sparse=True)
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
        pairs = [(x, x) for x in ids]
        dls = DataLoaders(*(torch.utils.data.DataLoader(pairs, batch_size=4) for _ in range(2)))
        learn = Learner(dls, net, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), cbs=callback,
                        opt_func=lambda groups, lr, **_: _SparseSGD(groups, lr))
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, lr=.1)
        w = net.words.weight
        assert int((w == 0).sum()) >= 320 if isinstance(callback, SparsifyCallback) else all(len(row.unique()) <= 8 for row in w)


def _SparseSGD(groups, lr):
    """PyTorch's own optimizer, which takes sparse gradients, for fastai"""
    from fastai.optimizer import OptimWrapper
    return OptimWrapper(groups, torch.optim.SGD, lr=lr)


def test_torchao_runs_tables():
    """Integers of a tied table are those that were measured; a bag is refused by name"""
    pytest.importorskip("torchao")
    from torchao.quantization import quantize_

    from fasterai_sens import split_plan, to_torchao_config
    net = speaker()
    with quantize_model(net, {"words": 4}), torch.no_grad():
        expected = net(ids)
    quantize_(net, to_torchao_config({"words": 4}, net), filter_fn=None)
    with torch.no_grad():
        assert torch.allclose(net(ids), expected, atol=1e-5)
    bag = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2))
    _, left = split_plan({"0": 4, "1": 4}, bag)
    assert "belongs to EmbeddingBag '0'" in dict(left)["0"]


class NGrams(nn.Module):
    """Guesses the next byte from the last four: a table of hashed n-grams, and two layers"""

    def __init__(self, n=2048, d=12):
        super().__init__()
        self.grams, self.inner, self.head = nn.Embedding(n, d), nn.Linear(4 * d, 64), nn.Linear(64, 128)

    def forward(self, last):
        """Logits of 128 characters"""
        hashes, h = [], torch.zeros_like(last[:, 0])
        for i in range(4):
            h = (h * 131 + last[:, -1 - i] + 17 * i + 1) % len(self.grams.weight)
            hashes.append(h)
        return self.head(self.inner(self.grams(torch.stack(hashes, 1)).flatten(1)).relu())


def test_half_of_a_language_models_bytes():
    """A plan for a quarter of the bytes takes the table in, which is two thirds of them; without it, it cannot be had"""
    torch.manual_seed(0)
    text = "".join(f.read_text(errors="ignore") for f in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")))
    codes = tensor(list(text.encode("ascii", "ignore")[:200_000]))
    windows = codes.unfold(0, 5, 1)
    x, y = windows[:, :4], windows[:, 4]
    net = NGrams()
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(250):
        batch = torch.randint(150_000, (512,))
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    net.eval()

    def bits(preds, targets):
        return F.cross_entropy(preds, targets, reduction="none") / math.log(2)
    held_out = x[160_000::20], y[160_000::20]

    def per_byte(m):
        with torch.no_grad():
            return bits(m(held_out[0]), held_out[1]).mean().item()
    data = evaluation((x[150_000:160_000:10], y[150_000:160_000:10]), bits)
    analyzer = SensitivityAnalyzer(net, x[:2], data, higher_is_better=False, metric_name="bits per byte")
    sweep = analyzer.sweep("quantization", [8, 6, 4, 3, 2], verbose=False)
    table = net.grams.weight.numel() * 4
    whole = sum(p.numel() for p in net.parameters()) * 4
    plan = allocate(sweep, {"bytes": "25%"}, model=net, sample=x[:2], verbose=False)
    before = per_byte(net)
    with Applier(net, x[:2], settings=plan.settings)(plan):
        after = per_byte(net)
    print(f"table {table / whole:.0%} of {whole:,} bytes; plan {plan.costs['bytes']:,}, {dict(plan.quantization)}; bits per byte {before:.3f} -> {after:.3f}")
    assert table > whole / 2 and "grams" in plan.quantization and plan.costs["bytes"] <= whole / 4
    assert before < 3.6 and after < before + .1
    with pytest.raises(ValueError):
        allocate(sweep, {"bytes": "25%"}, model=net, sample=x[:2], locked=["grams"], verbose=False)
