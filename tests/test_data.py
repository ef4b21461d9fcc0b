"""Data as `eval_fn`, and what models take and return: named tuples, dicts, Hugging Face's batches and outputs."""
from collections import UserDict, namedtuple
from dataclasses import dataclass

import fastai.callback.progress  # noqa: F401  gives Learner its `no_bar`
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from fasterai_sens import (
    FineTuned,
    SensitivityAnalyzer,
    Settle,
    SparsifyCallback,
    allocate,
    analyze_degradation,
    analyze_sensitivity,
    changes,
    evaluation,
    fingerprint,
    kl_from,
    search_plan,
    search_targets,
    taylor,
    validate_compression_target,
    wanda,
)
from fasterai_sens.core.inputs import call, mapped, split, tensors_in
from fasterai_sens.measure.data import as_eval_fn
from fasterai_sens.measure.objectives import Divergence
from fasterai_sens.measure.scores import as_score

torch.manual_seed(0)
x, y = torch.randn(40, 4), torch.randint(3, (40,))
Batch = namedtuple("Batch", ["inputs", "targets"])


def net():
    """Three classes, the same each time"""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def right(model):
    """Whether each sample is, by hand"""
    with torch.no_grad(): return (model(x).argmax(1) == y).float()


def loaders():
    """The same data in all forms"""
    ds = TensorDataset(x, y)
    fastai_dls = DataLoaders.from_dsets(ds, ds, bs=16, device="cpu")
    return {
        "pair": (x, y),
        "pair with NumPy": (x, y.numpy()),
        "column of classes": (x, y[:, None]),
        "one-hot": (x, F.one_hot(y, 3)),
        "probabilities": (x, F.one_hot(y, 3)*.9 + .1/3),
        "named tuple": Batch(x, y),
        "list of batches": [(x[:30], y[:30]), (x[30:], y[30:])],
        "list of named tuples": [Batch(x[:30], y[:30]), Batch(x[30:], y[30:])],
        "list of lists": [[x, y]],
        "dict": {"input": x, "labels": y},
        "dicts": [{"input": x[:30], "labels": y[:30]}, UserDict({"input": x[30:], "labels": y[30:]})],
        "DataLoader": DataLoader(ds, 16),
        "fastai": fastai_dls.valid,
    }


@pytest.mark.parametrize("form", loaders())
def test_data_means_accuracy_of_each_sample(form):
    """Accuracy sample by sample, the divergence as objective, and the model as it was."""
    model, data = net(), loaders()[form]
    result, before = SensitivityAnalyzer(model, x[:1], data).analyze("quantization", 2, verbose=False), fingerprint(model)
    by_hand = SensitivityAnalyzer(model, x[:1], evaluation((x, y), lambda out, t: (out.argmax(1) == t).float(), "kl")).analyze("quantization", 2, verbose=False)
    assert result.objective_name == "kl" and not changes(before, fingerprint(model))
    for mine, other in zip(result.layers, by_hand.layers, strict=True):
        assert (mine.delta, *mine.ci) == pytest.approx((other.delta, *other.ci)) and mine.objective_delta == pytest.approx(other.objective_delta, rel=1e-4)
    score, _ = as_eval_fn(data)(model)
    assert torch.equal(score, right(model))


def test_every_door_takes_data():
    """Function and class, search of targets and of plans, degradation, validation, training inside."""
    model, data, options = net(), DataLoader(TensorDataset(x, y), 16), dict(verbose=False)
    assert analyze_sensitivity(model, x[:1], data, **options).baseline_metric == pytest.approx(right(model).mean().item())
    assert search_targets(model, x[:1], (x, y), 50, report_fn=data, evaluations=20, **options).metric_name == "accuracy"
    sweep = SensitivityAnalyzer(model, x[:1], data).sweep(levels=[25, 50, 75], **options)
    assert allocate(sweep, "70%", model=model)
    assert search_plan(model, x[:1], data, sweep, "70%", report_fn=(x, y), evaluations=10, **options).plan
    curve = analyze_degradation(model, x[:1], data, [100, 60], "sparsity", runs=0, **options)
    assert curve.baseline_metric == pytest.approx(right(model).mean().item())
    assert validate_compression_target(model, net(), data, .1).baseline_metric == pytest.approx(right(model).mean().item())
    tuned = FineTuned(lambda m: None, data)
    assert torch.equal(tuned(model)[0], right(model))


def test_loaders_with_processes_of_their_own(tmp_path):
    """Two processes give the numbers of none: as `eval_fn`, where it trains, and in a fit with a callback; the model comes back."""
    ds, found = TensorDataset(x, y), []
    for n in (0, 2):
        model, loader = net(), DataLoader(ds, 20, shuffle=True, num_workers=n)
        before = fingerprint(model)

        def train(m, loader=loader):
            opt = torch.optim.SGD(m.train().parameters(), .1)
            for a, b in loader:
                opt.zero_grad()
                F.cross_entropy(m(a), b).backward()
                opt.step()

        results = [analyze_sensitivity(model, x[:1], data, verbose=False) for data in (loader, FineTuned(train, loader))]
        assert not changes(before, fingerprint(model))
        set_seed(0)
        learn = Learner(DataLoaders.from_dsets(ds, ds, bs=20, device="cpu", num_workers=n), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=tmp_path)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .1, cbs=SparsifyCallback(50))
        assert [int((m.weight == 0).sum()) for m in (model[0], model[2])] == [16, 12]
        results.append(SensitivityAnalyzer.from_learner(learn).analyze(verbose=False))
        found.append([[(r.delta, r.objective_delta) for r in result.layers] for result in results] + [p.tolist() for p in model.parameters()])
    assert found[0] == found[1] and any(delta for delta, _ in found[0][1])


class Stream(IterableDataset):
    """Yields its samples the first time only"""

    def __init__(self):
        self.left = [(a, b) for a, b in zip(x, y, strict=True)]

    def __iter__(self):
        left, self.left = self.left, []
        return iter(left)


class Augmented(torch.utils.data.Dataset):
    """Other noise each time, from a generator of its own"""
    rng = np.random.default_rng(0)

    def __len__(self): return 40
    def __getitem__(self, i): return x[i] + float(self.rng.normal()), y[i]


def shuffled():
    """Loaders in another order each time, unless their generators are set back"""
    ds = TensorDataset(x, y)
    return {
        "global generator": DataLoader(ds, 16, shuffle=True),
        "own generator": DataLoader(ds, 16, shuffle=True, generator=torch.Generator()),
        "drop_last": DataLoader(ds, 16, shuffle=True, drop_last=True),
        "sampler": DataLoader(ds, 16, sampler=torch.utils.data.RandomSampler(ds, generator=torch.Generator())),
        "batch sampler": DataLoader(ds, batch_sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(ds), 16, False)),
        "fastai train": DataLoaders.from_dsets(ds, ds, bs=16, device="cpu", num_workers=0).train,
    }


@pytest.mark.parametrize("form", shuffled())
def test_shuffled_data_comes_in_one_order(form):
    """The samples of two evaluations are the same ones: rounding to 16 bits moves nothing."""
    model = net()
    result = SensitivityAnalyzer(model, x[:1], shuffled()[form]).analyze("quantization", 16, verbose=False)
    assert [r.delta for r in result.layers] == [0, 0] and max(r.objective_delta for r in result.layers) < 1e-6
    eval_fn = as_eval_fn(shuffled()[form])
    assert torch.equal(eval_fn(model)[0], eval_fn(model)[0])


@pytest.mark.parametrize("data", [lambda: DataLoader(Augmented(), 16), lambda: DataLoader(Stream(), 16), lambda: RandomOrder()], ids=["augmented", "stream", "own order"])
def test_data_that_changes_is_refused(data):
    """Random augmentation, a stream that is used up, an order that nobody can hold."""
    with pytest.raises(ValueError, match="same samples in the same order|is empty"): SensitivityAnalyzer(net(), x[:1], data()).analyze(verbose=False)


class RandomOrder(list):
    """Batches in an order of its own"""
    n = 0

    def __iter__(self):
        self.n += 1
        parts = [(x[:20], y[:20]), (x[20:], y[20:])]
        return iter(parts if self.n == 1 else parts[::-1])

    def __len__(self): return 2


no_classifier = {   # outputs, targets, words of the error
    "regression": (lambda: nn.Linear(4, 3), torch.randn(40, 3), ["numbers, not classes", "evaluation(data, lambda out, y: -(out - y).square()"]),
    "regression of one number": (lambda: nn.Linear(4, 1), torch.randn(40, 1), ["evaluation(data, lambda out, y: -(out.flatten()"]),
    "one logit": (lambda: nn.Linear(4, 1), torch.randint(2, (40,)), ["one logit", "(out.flatten() > 0) == y.flatten()"]),
    "one logit, flat": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), torch.randint(2, (40,)).float(), ["one logit"]),
    "several classes at once": (lambda: nn.Linear(4, 3), torch.randint(2, (40, 3)).float(), ["several classes at once", "((out > 0) == y.bool())"]),
    "class numbers in floating point": (lambda: nn.Linear(4, 3), y.float(), ["numbers, not classes"]),
    "classes that the model lacks": (lambda: nn.Linear(4, 2), y, ["targets go from 0 to 2", "the model has 2 classes"]),
    "two targets": (lambda: nn.Linear(4, 3), (y, y), ["the targets are tuple"]),
    "other lengths": (lambda: nn.Linear(4, 3), y[:, None].expand(40, 2), ["targets (40, 2)"]),
}


@pytest.mark.parametrize(("make", "targets", "words"), no_classifier.values(), ids=no_classifier)
def test_what_is_no_classification_is_told_what_to_write(make, targets, words):
    """The error has the line to write, and the model is as it was."""
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError) as e: SensitivityAnalyzer(model, x[:1], (x, targets)).analyze(verbose=False)
    for w in words: assert w in str(e.value)
    assert not changes(before, fingerprint(model))


@pytest.mark.parametrize(("bad", "error", "words"), [
    (None, TypeError, "NoneType"), ("accuracy", TypeError, "str"), (x, TypeError, "Tensor"),
    (TensorDataset(x, y), TypeError, "DataLoader"), (DataLoaders.from_dsets(TensorDataset(x, y), TensorDataset(x, y), bs=4, num_workers=0), TypeError, "dls.valid"),
    (DataLoader(TensorDataset(x[:0], y[:0])), ValueError, "is empty"),
    ((x, torch.full_like(y, -100)), ValueError, "no target that counts")])
def test_data_that_is_none(bad, error, words):
    """What came, and what would do."""
    with pytest.raises(error, match=words): SensitivityAnalyzer(net(), x[:1], bad).analyze(verbose=False)


def test_models_of_two_inputs():
    """Tuples of inputs, by the sample."""
    class Two(nn.Module):
        """Adds its inputs"""
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
        def forward(self, a, b): return self.fc(a + b)
    model = Two()
    for data in (((x, x), y), [(x, x, y)], DataLoader(TensorDataset(x, x, y), 16)):
        assert SensitivityAnalyzer(model, (x[:1], x[:1]), data).analyze(verbose=False).baseline_metric == pytest.approx((model(x, x).argmax(1) == y).float().mean().item())


def test_segmented_images_and_tokens():
    """Each image or sequence is a sample; -100 does not count, nor 255 in images."""
    torch.manual_seed(0)
    images, masks = torch.randn(6, 2, 5, 5), torch.randint(3, (6, 5, 5))
    masks[0, 0], masks[1, 1] = -100, 255
    conv = nn.Conv2d(2, 3, 1)
    hit, counts = (conv(images).argmax(1) == masks).float(), (masks != -100) & (masks != 255)
    assert torch.allclose(as_eval_fn((images, masks))(conv)[0], (hit*counts).flatten(1).sum(1)/counts.flatten(1).sum(1))
    words, tags = torch.randn(6, 7, 4), torch.randint(3, (6, 7))
    tags[0, 3:] = -100
    fc = nn.Linear(4, 3)
    score = as_score(as_eval_fn((words, tags))(fc))
    assert score.value == pytest.approx((fc(words).argmax(-1) == tags)[tags != -100].float().mean().item()) and len(score.samples) == 6


# Hugging Face

def tiny(kind):
    """A small model from its config, a batch with labels, and its number of classes"""
    torch.manual_seed(0)
    size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ids = torch.randint(3, 50, (8, 6))
    if kind == "BERT": return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **size)), dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.randint(3, (8,)))
    if kind == "ViT": return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **size)), dict(pixel_values=torch.randn(8, 3, 8, 8), labels=torch.randint(3, (8,)))
    if kind == "GPT-2": return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)), dict(input_ids=ids, labels=ids)
    labels = torch.randint(3, 50, (8, 5))
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config), dict(input_ids=ids, decoder_input_ids=labels.roll(1, 1), labels=labels)


def halves(batch):
    """Two batches, as a tokenizer gives them"""
    return [BatchEncoding({k: v[part] for k, v in batch.items()}) for part in (slice(0, 4), slice(4, 8))]


def predicted(kind, model, batch):
    """Right or not, by hand, and logits"""
    with torch.no_grad(): logits = model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits
    if kind == "GPT-2": return logits[:, :-1].argmax(-1) == batch["labels"][:, 1:], logits
    return logits.argmax(-1) == batch["labels"], logits


@pytest.mark.parametrize("kind", ["BERT", "ViT", "GPT-2", "T5"])
def test_hugging_face_models(kind):
    """Data, `evaluation` by attribute and by key, "kl" and `kl_from` agree; all criteria that use data run on dicts with labels."""
    model, batch = tiny(kind)
    hit, _ = predicted(kind, model, batch)
    sample = BatchEncoding({k: v[:1] for k, v in batch.items() if k != "labels"})
    shift = (lambda logits: logits[:, :-1], lambda t: t[:, 1:]) if kind == "GPT-2" else (lambda logits: logits, lambda t: t)
    ways = dict(
        data=halves(batch),
        attribute=evaluation(halves(batch), lambda out, t: (shift[0](out.logits).argmax(-1) == shift[1](t)).float(), "kl"),
        key=evaluation(halves(batch), lambda out, t: (shift[0](out["logits"]).argmax(-1) == shift[1](t)).float(), "kl"))
    before = fingerprint(model)
    results = {n: SensitivityAnalyzer(model, sample, f).analyze("quantization", 3, verbose=False) for n, f in ways.items()}
    far = SensitivityAnalyzer(model, sample, kl_from(model.eval(), halves(batch), sample), higher_is_better=False).analyze("quantization", 3, verbose=False)
    for r in results.values():
        assert r.baseline_metric == pytest.approx(hit.float().mean().item(), abs=1e-6)
        if kind == "GPT-2" and r is results["data"]: continue   # without the last position of each, which predicts nothing
        for a, b in zip(r.layers, far.layers, strict=True): assert a.objective_delta == pytest.approx(b.delta, rel=1e-3, abs=1e-7)
    for criteria in (taylor, wanda):
        found = SensitivityAnalyzer(model, sample, ways["data"], criteria=criteria, calibration_data=halves(batch)).analyze("sparsity", 50, verbose=False)
        assert sum(r.prunable for r in found.layers) >= 3
    assert not [c for c in changes(before, fingerprint(model)) if not c.startswith("modes")]


def test_taylor_uses_the_loss_of_the_model():
    """A causal language model shifts its labels; without that the gradients would be those of another task."""
    model, batch = tiny("GPT-2")
    seen = []
    hook = model.register_forward_hook(lambda m, args, kwargs, out: seen.append(out.loss), with_kwargs=True)
    SensitivityAnalyzer(model, {"input_ids": batch["input_ids"][:1]}, lambda m: 1., criteria=taylor, calibration_data=halves(batch)).analyze(verbose=False)
    hook.remove()
    assert sum(loss is not None for loss in seen) == 2


def test_outputs_of_batches_are_joined_as_what_they_are():
    """A `ModelOutput` stays one; hidden states of other lengths and caches are left out, logits of other lengths are told about."""
    model, batch = tiny("GPT-2")
    model.config.output_hidden_states = True
    kinds = []

    def metric(out, t):
        kinds.append((type(out), out.logits.shape, out["logits"] is out.logits, out.hidden_states is not None))
        return 1.

    def data(n): return [({"input_ids": batch["input_ids"][:4]}, torch.zeros(4)), ({"input_ids": batch["input_ids"][4:, :n]}, torch.zeros(4))]
    evaluation(data(6), metric)(model)
    assert kinds == [(type(model(**data(6)[0][0])), (8, 6, 50), True, True)]
    with pytest.raises(ValueError, match="different lengths.*max_length"): evaluation(data(4), metric)(model)
    with pytest.raises(ValueError, match="different lengths"): kl_from(model, [d[0] for d in data(4)], data(4)[0][0])
    assert as_score(as_eval_fn([{"input_ids": batch["input_ids"][i:i+4, :6-i], "labels": batch["input_ids"][i:i+4, :6-i]} for i in (0, 4)])(model)).samples.shape == (8,)


@pytest.mark.parametrize("objective", ["kl", None, lambda out, t: F.cross_entropy(out.logits, t)], ids=["kl", "none", "function"])
def test_a_learner_of_a_model_that_returns_a_model_output(objective):
    """fastai makes a dict of it; metric and objective see attributes and keys alike."""
    class Wrapped(nn.Module):
        """A classifier that returns a `ModelOutput`"""
        def __init__(self):
            super().__init__()
            self.body = net()
        def forward(self, x): return SequenceClassifierOutput(logits=self.body(x))

    def accuracy(out, t): return (out.logits.argmax(1) == t).float().mean()

    ds = TensorDataset(x, y)
    learn = Learner(DataLoaders.from_dsets(ds, ds, bs=16, device="cpu", num_workers=0), Wrapped(), loss_func=lambda out, t: F.cross_entropy(out["logits"], t), metrics=[accuracy])
    result = SensitivityAnalyzer.from_learner(learn, objective=objective).analyze(verbose=False)
    assert result.baseline_metric == pytest.approx(right(learn.model.body).mean().item())


def test_divergence_finds_the_classes():
    """Classes on the second axis as in PyTorch, on the last as in Hugging Face; the axis may be said."""
    logits, tokens = torch.randn(2, 5, 4), torch.zeros(2, 5, dtype=torch.long)
    def far(out, t=None, axis=None):
        d = Divergence(axis)
        d(out if isinstance(out, torch.Tensor) else SequenceClassifierOutput(logits=out.logits), t)
        return d(out + logits if isinstance(out, torch.Tensor) else SequenceClassifierOutput(logits=out.logits + logits), t)
    last, second = far(logits, axis=-1), far(logits, axis=1)
    assert not torch.allclose(last, second)
    assert torch.equal(far(logits, tokens), last) and torch.equal(far(logits, tokens[:, :4]), second)
    assert torch.equal(far(SequenceClassifierOutput(logits=logits)), last) and torch.equal(far(logits), second)


# Containers

@dataclass
class Graph:
    """Tensors by name"""
    x: torch.Tensor
    note: str = "kept"


def test_containers_stay_what_they_are():
    """Named tuples, dataclasses, tokenizers' batches and model outputs come back as the same kind."""
    double = lambda t: 2*t  # noqa: E731
    one = torch.ones(1)
    for c in (Batch(one, [one]), BatchEncoding({"a": one}), SequenceClassifierOutput(logits=one), {"a": (one, one)}, [Batch(one, one)], Graph(one), UserDict(a=one)):
        out = mapped(double, c)
        assert type(out) is type(c) and [t.item() for t in tensors_in(out)] == [2.]*len(list(tensors_in(c)))
    assert mapped(double, Graph(one)).note == "kept" and mapped(double, SequenceClassifierOutput(logits=one)).logits == 2


def test_named_tuples_as_samples_and_batches():
    """A named tuple is a tuple of inputs, or a pair of inputs and targets, whatever the door."""
    Inputs = namedtuple("Inputs", ["input1", "input2"])
    model, sample = Joined(), Inputs(x[:1], x[:1])
    assert call(model, sample).shape == (1, 3) and split(Batch(x, y), x[:1])[1] is y
    data = [Batch(Inputs(x, x), y)]
    for criteria in (taylor, wanda):
        result = SensitivityAnalyzer(model, sample, evaluation(data, lambda out, t: (out.argmax(1) == t).float()), criteria=criteria, calibration_data=[(x, x, y)]).analyze(verbose=False)
        assert result.baseline_metric == pytest.approx((model(x, x).argmax(1) == y).float().mean().item())
    with pytest.raises(ValueError, match="the sample has 'b', and a batch of the data has only 'a', 'labels'"): split({"a": x, "labels": y}, {"a": x, "b": x})


class Joined(nn.Module):
    """Two inputs by name"""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.fc = nn.Linear(8, 3)

    def forward(self, input1, input2): return self.fc(torch.cat([input1, input2], 1))


@pytest.mark.parametrize("run", [
    lambda m, d: SensitivityAnalyzer(m, x[:1], d, higher_is_better=False), lambda m, d: search_targets(m, x[:1], d, 50, higher_is_better=False, verbose=False),
    lambda m, d: search_targets(m, x[:1], lambda m: m(x).mean(), 50, higher_is_better=False, report_fn=d, verbose=False),
    lambda m, d: analyze_degradation(m, x[:1], d, higher_is_better=False), lambda m, d: validate_compression_target(m, net(), d, .1, higher_is_better=False)],
    ids=["analyzer", "search", "report", "degradation", "validation"])
def test_accuracy_is_not_minimized(run):
    """Data means accuracy; the wrong direction is an error, not a ranking upside down."""
    with pytest.raises(ValueError, match="more is better"): run(net(), (x, y))


def test_a_metric_that_takes_an_output_for_a_tensor():
    """Of a Hugging Face model a metric gets the whole output, as the help says; an error says how to take the logits"""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3)).eval()
    batch = dict(input_ids=torch.randint(50, (8, 6)), labels=torch.randint(3, (8,)))
    with pytest.raises(TypeError, match=r"here a SequenceClassifierOutput: use predictions\.logits"):
        evaluation(batch, lambda p, t: (p.argmax(-1) == t).float(), "kl")(model)
    with pytest.raises(TypeError, match=r"here a SequenceClassifierOutput"):
        evaluation(batch, lambda p, t: (p.logits.argmax(-1) == t).float(), F.cross_entropy)(model)
    right, kl = evaluation(batch, lambda p, t: (p.logits.argmax(-1) == t).float(), "kl")(model)
    assert right.shape == (8,) and torch.equal(kl, torch.zeros(8))
    with pytest.raises(AttributeError, match="no attribute 'none'"):   # a mistake of another kind is not explained away
        evaluation((torch.randn(4, 3), torch.zeros(4)), lambda p, t: p.none)(torch.nn.Identity())
    assert "`predictions.logits`" in evaluation.__doc__


calls = {
    "analyze": lambda a: a.analyze("sparsity", 50, verbose=False),
    "estimate": lambda a: a.estimate("sparsity", [50, 90], verbose=False),
    "settle": lambda a: a.sweep("sparsity", [50], adaptive=Settle(threshold=.1), verbose=False),
    "search_targets": lambda a: search_targets(a.model, a.sample, a.eval_fn, 50, evaluations=30, verbose=False),
    "search_plan": lambda a: search_plan(a.model, a.sample, a.eval_fn, a.sweep("sparsity", [50, 90], verbose=False), {"params": "60%"}, evaluations=30, verbose=False),
}


@pytest.mark.parametrize("call_it", calls.values(), ids=calls)
@pytest.mark.parametrize("wrap", [lambda dl: dl, lambda dl: evaluation(dl, is_right, "kl")], ids=["loader", "evaluation"])
def test_reading_loaders_draws_nothing(wrap, call_it):
    """A DataLoader draws a random number whenever it is read; who trains later has the numbers that he had."""
    analyzer = SensitivityAnalyzer(net(), x[:1], wrap(DataLoader(TensorDataset(x, y), batch_size=16)))
    state = torch.get_rng_state()
    call_it(analyzer)
    assert torch.equal(torch.get_rng_state(), state)


def is_right(preds, targs):
    """Whether each is right"""
    return (preds.argmax(1) == targs).float()


def two_inputs():
    """A Learner whose model takes two inputs, sizes in the order of the data"""
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, one, other): return self.b(F.relu(self.a(one + other)))
    torch.manual_seed(1)
    ds = TensorDataset(x, x.flip(0), y)
    dls = DataLoaders.from_dsets(ds, ds, bs=16, num_workers=0, device="cpu", n_inp=2)
    return Learner(dls, Sum().eval(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)


def test_learner_is_data():
    """What takes single samples gets those of a Learner: an estimate, a few samples first, parts in a search; the numbers are those of its batches as data."""
    learn = two_inputs()
    ours = SensitivityAnalyzer.from_learner(learn)
    theirs = SensitivityAnalyzer(learn.model, (x[:1], x[:1]), evaluation(learn.dls.valid, is_right, "kl"))
    damages = [[row.delta for result in a.estimate("sparsity", [50, 90], verbose=False) for row in result.layers] for a in (ours, theirs)]
    assert damages[0] == pytest.approx(damages[1], abs=1e-7) and max(damages[0]) > 0
    sides = [[row.side for row in a.sweep("sparsity", [50], adaptive=Settle(threshold=.1), verbose=False)[0].layers] for a in (ours, theirs)]
    assert sides[0] == sides[1] and None not in sides[0]
    plans = [search_targets(a.model, a.sample, a.eval_fn, 60, evaluations=30, verbose=False).plan for a in (ours, theirs)]
    assert plans[0] == plans[1]


def test_learner_that_does_more_is_no_data():
    """Where a callback comes between data and model, or samples come in another order, nobody takes the batches for what the model sees."""
    learn = two_inputs()
    class Doubled(Callback):
        def before_batch(self): self.learn.xb = tuple(2*t for t in self.xb)
    with learn.added_cbs(Doubled()): analyzer = SensitivityAnalyzer.from_learner(learn)
    with pytest.raises(ValueError, match="of a Learner evaluation"): analyzer.estimate("sparsity", [50])
    turned = learn.dls.valid.new(get_idxs=lambda: list(range(40))[::-1])
    with pytest.raises(ValueError, match="of a Learner evaluation"): SensitivityAnalyzer.from_learner(learn, dl=turned).estimate("sparsity", [50])
