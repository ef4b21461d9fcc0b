"""`CompressCallback` in Hugging Face's Trainer: the numbers of a plain loop, the best checkpoint, a training that goes on."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_hold import BS, N_BATCHES, STEPS, batches, check_same, new_net, on_grid, plans, rows, zeros
from torch import nn

from fasterai_sens import CompressCallback, LayerTargets, Plan, Schedule, hold
from fasterai_sens.train.schedules import agp, lin

pytest.importorskip("accelerate")
from torch.utils.data import SequentialSampler  # noqa: E402
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402


class Net(nn.Module):
    """The layers of `new_net`, with a loss of their own."""

    def __init__(self):
        super().__init__()
        self.layers = new_net()

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def named(targets):
    """Targets for the layers inside `Net`."""
    if isinstance(targets, Plan):
        return Plan({name: named(of_method) for name, of_method in targets.items()})
    inside = {f"layers.{name}": level for name, level in targets.items()}
    return type(targets)(inside) if not type(targets) is LayerTargets else LayerTargets(inside, method=targets.method)


class InOrder(Trainer):
    """Batches in the order of the data."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


x, y = rows()
data = [dict(x=a, labels=b) for a, b in zip(x, y, strict=True)]


def trainer(path, net, callbacks, lr=0.05, accumulate=1, epochs=2, **how):
    """A quiet Trainer with plain SGD."""
    args = TrainingArguments(
        path,
        num_train_epochs=epochs,
        per_device_train_batch_size=BS // accumulate,
        gradient_accumulation_steps=accumulate,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **dict(max_grad_norm=0.0, save_strategy="no") | how,
    )
    sgd = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
    return InOrder(net, args, train_dataset=data, eval_dataset=data[:32], callbacks=callbacks, optimizers=(sgd, constant))


def by_hand(net, targets, schedule, clip=0.0):
    """The same training in a plain loop."""
    sgd = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    with hold(net, targets, schedule, STEPS, optimizer=sgd, sample=torch.zeros(2, 8)) as step:
        for a, b in batches():
            sgd.zero_grad()
            net(a, b)["loss"].backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            sgd.step()
            step()
    return step


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow]*(n != "both")) for n in plans])
def test_the_numbers_of_a_plain_loop(name, clip, tmp_path):
    ours, theirs = Net(), Net()
    by_hand(ours, named(plans[name]), lin, clip)
    trainer(tmp_path, theirs, [cb := CompressCallback(named(plans[name]), lin)], max_grad_norm=clip).train()
    check_same(ours, theirs)
    assert all(r["reached"] for r in cb.report)


def test_channels(tmp_path):
    ours, theirs = Net(), Net()
    targets = LayerTargets({"layers.0": 50}, method="pruning")
    by_hand(ours, targets, lin)
    trainer(tmp_path, theirs, [cb := CompressCallback(targets, lin, sample=torch.zeros(2, 8))]).train()
    assert theirs.layers[0].out_features == 8 and cb.report[0]["reached"]
    check_same(ours, theirs)


def test_accumulated_gradients(tmp_path):
    """A step of the schedule for each update, and not for each part of a batch."""
    whole, parts = Net(), Net()
    for net in (whole, parts):
        net.layers[1] = nn.Identity()  # batch norm sees the parts
    by_hand(whole, named(plans["both"]), lin)
    trainer(tmp_path, parts, [CompressCallback(named(plans["both"]), lin)], accumulate=4).train()
    check_same(whole, parts)


class Scores(TrainerCallback):
    """The first, dense epoch looks best; remembers what each evaluation saw."""

    def __init__(self, falls=(0.9, 0.8, 0.6, 0.7, 0.5, 0.4)):
        self.falls, self.seen = list(falls), []

    def __call__(self, p):
        return {"accuracy": self.falls[len(self.seen)]}

    def on_evaluate(self, args, state, control, model=None, **_):
        self.seen.append((zeros(model.layers), copy.deepcopy(model.state_dict())))


def test_the_best_checkpoint_is_one_at_the_target(tmp_path):
    """The schedule arrives in the third of six epochs; of those from there on the fourth is the best."""
    net, scores = Net(), Scores()
    cb = CompressCallback(named(plans["both"]), Schedule(lin.f, 0, 0.5))
    how = dict(eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy")
    t = trainer(tmp_path, net, [cb, scores, EarlyStoppingCallback(2)], epochs=6, **how)
    t.compute_metrics = scores
    t.train()
    assert [z[0] >= 102 for z, _ in scores.seen] == [False, False, True, True, True, True]
    assert t.state.best_metric == 0.7 and t.state.best_model_checkpoint.endswith(str(4 * N_BATCHES))
    check_same(net, _with_state(scores.seen[3][1]))
    assert on_grid(net.layers) and all(r["reached"] for r in cb.report)


def _with_state(state):
    net = Net()
    net.load_state_dict(state)
    return net


def test_no_dense_checkpoint_comes_back(tmp_path):
    """Stopped before the target: nothing is loaded, and a warning says how far it came."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3 * N_BATCHES

    net, scores = Net(), Scores()
    how = dict(eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy")
    t = trainer(tmp_path, net, [CompressCallback(named(plans["sparse"]), lin), scores, Stop()], epochs=6, **how)
    t.compute_metrics = scores
    with pytest.warns(UserWarning, match="'layers.0' has 39.84 % of 80 %"):
        t.train()
    assert zeros(net.layers)[0] == 51 and t.state.best_model_checkpoint is None


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow]*(n != "both")) for n in plans])
def test_a_training_goes_on_from_a_checkpoint(name, tmp_path):
    """To the bit, with the float weights and masks that the checkpoint holds; without them it says so."""
    whole, half = Net(), Net()
    trainer(tmp_path / "whole", whole, [CompressCallback(named(plans[name]), lin)], save_strategy="steps", save_steps=9).train()
    checkpoint = tmp_path / "whole" / "checkpoint-9"
    assert (checkpoint / "compression.pt").is_file() and json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 9
    again = trainer(tmp_path / "whole", half, [CompressCallback(named(plans[name]), lin)])
    again.train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(a, b) for a, b in zip(half.state_dict().values(), whole.state_dict().values(), strict=True))
    (checkpoint / "compression.pt").unlink()
    with pytest.warns(UserWarning, match="are found anew"):
        trainer(tmp_path / "whole", Net(), [cb := CompressCallback(named(plans[name]), lin)]).train(resume_from_checkpoint=str(checkpoint))
    assert all(r["reached"] for r in cb.report)


def test_a_second_training_and_one_that_failed(tmp_path):
    """The same callback goes on where it ended; one whose training failed begins anew."""
    net, cb = Net(), CompressCallback(named(plans["both"]), agp)
    trainer(tmp_path, net, [cb]).train()
    gone = net.layers[0].weight == 0
    trainer(tmp_path, net, [cb]).train()
    assert (net.layers[0].weight[gone] == 0).all() and on_grid(net.layers)
    broken = trainer(tmp_path, net, [cb])
    broken.create_optimizer()
    broken.optimizer.step = partial(_fail)
    with pytest.raises(ArithmeticError):
        broken.train()
    trainer(tmp_path, net, [cb]).train()
    assert on_grid(net.layers) and all(r["reached"] for r in cb.report)
    trainer(tmp_path, net, [cb]).evaluate()  # outside a training it changes nothing


def _fail(*_):
    raise ArithmeticError


def test_names_of_the_wrong_model_are_an_error_before_training(tmp_path):
    net = Net()
    with pytest.raises(KeyError):
        trainer(tmp_path, net, [CompressCallback({"first": 50})]).train()
    check_same(net, Net())
    assert not Path(tmp_path, "checkpoint-1").exists()
