"""Training without fastai: `hold` in plain loops gives the numbers of the fastai callbacks, whatever wraps, scales or interrupts the loop."""

import copy
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fasterai_sens import BitPlan, LayerTargets, Perturbation, Plan, Schedule, hold, method
from fasterai_sens.core.layers import target_units
from fasterai_sens.core.protocol import methods
from fasterai_sens.methods.criteria import movement, updating_movement
from fasterai_sens.train.schedules import agp, lin, one_shot, schedules

N_BATCHES, BS = 12, 16


def new_net():
    """Layers "0" and "3" with 128 and 48 weights, and batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def rows():
    """Inputs and classes of all batches."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N_BATCHES * BS, 8, generator=g)
    return x, (x[:, :3] + 0.1 * x[:, 3:6]).argmax(1)


def batches(epochs=2):
    """The same batches in each epoch."""
    x, y = rows()
    for _ in range(epochs):
        yield from zip(x.split(BS), y.split(BS), strict=True)


STEPS = 2 * N_BATCHES
optimizers = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "adam": partial(torch.optim.AdamW, weight_decay=0.1),
    "fused": partial(torch.optim.Adam, fused=True),
}
plans = {
    "sparse": LayerTargets({"0": 80, "3": 50}, method="sparsity"),
    "bits": BitPlan({"0": 3, "3": 4}),
    "both": Plan(sparsity={"0": 80, "3": 50}, quantization={"0": 3, "3": 4}),
}


def loop(net, targets, schedule=agp, opt="sgd", lr=0.05, after=lambda i: None, steps=STEPS, total=STEPS, **how):
    """Train in a plain loop; the stepper."""
    with hold(net, targets, schedule, total, **how) as step:
        optimizer = how.get("optimizer") or optimizers[opt](net.parameters(), lr=lr)
        for i, (x, y) in zip(range(steps), batches(), strict=False):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            step()
            after(i)
    return step


def fit(net, cbs, opt="sgd", lr=0.05):
    """The same training by fastai."""
    import fastai.callback.schedule  # noqa: F401
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper
    from fastcore.basics import noop
    from torch.utils.data import TensorDataset

    dl = DataLoader(TensorDataset(*rows()), bs=BS, shuffle=False, num_workers=0)
    learn = Learner(DataLoaders(dl, dl), net, loss_func=nn.CrossEntropyLoss(), opt_func=partial(OptimWrapper, opt=optimizers[opt]), train_bn=True)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    learn.create_opt()
    # all parameters alike, as in the loop: fastai leaves weight decay out for batch norm
    learn.opt = OptimWrapper(opt=optimizers[opt](net.parameters(), lr=lr))
    learn.fit(2, lr, cbs=cbs)
    return learn


def callbacks(name, schedule=agp, **how):
    """What fastai users write for the same targets."""
    from fasterai_sens import QuantizeCallback, SparsifyCallback

    sparse, bits = SparsifyCallback({"0": 80, "3": 50}, schedule=schedule, **how), QuantizeCallback({"0": 3, "3": 4})
    return {"sparse": [sparse], "bits": [bits], "both": [sparse, bits]}[name]


def zeros(net):
    """Zeros of the two layers."""
    return [int((net[i].weight == 0).sum()) for i in (0, 3)]


def on_grid(net):
    """Whether the two layers have no more values in a row than 3 and 4 bits allow."""
    return all(max(len(row.unique()) for row in net[i].weight.detach()) <= n for i, n in ((0, 7), (3, 15)))


def check_same(one, other):
    """The same numbers to rounding, and zeros in the same places."""
    for (n, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=n)
        assert torch.equal(a == 0, b == 0), n


# ---------------------------------------------------------------- the numbers of fastai's callbacks


@pytest.mark.parametrize("name,schedule,opt", [*(("sparse", s, "sgd") for s in schedules), ("sparse", "agp", "adam"), ("bits", "agp", "sgd"), ("bits", "agp", "adam"), ("both", "lin", "sgd"), ("both", "agp", "adam")])
def test_same_numbers_as_in_fastai(name, schedule, opt):
    ours, theirs = new_net(), new_net()
    loop(ours, plans[name], schedules[schedule], opt)
    fit(theirs, callbacks(name, schedules[schedule]), opt)
    check_same(ours, theirs)
    if schedule != "dsd":
        assert name == "bits" or [a >= b for a, b in zip(zeros(ours), (102, 24), strict=True)] == [True, True]
    assert name == "sparse" or on_grid(ours)


@pytest.mark.parametrize("criteria,how", [(movement, {}), (updating_movement, {"granularity": "row"}), (None, {"context": "global"})])
def test_same_numbers_with_options(criteria, how):
    from fasterai_sens import SparsifyCallback

    how = how | ({} if criteria is None else {"criteria": criteria})
    ours, theirs = new_net(), new_net()
    loop(ours, 60, lin, **how)
    fit(theirs, [SparsifyCallback(60, schedule=lin, **how)])
    check_same(ours, theirs)


def test_same_channels_as_in_fastai():
    from fasterai_sens import PruneCallback

    ours, theirs = new_net(), new_net()
    sgd = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    step = loop(ours, LayerTargets({"0": 50}, method="pruning"), lin, optimizer=sgd, sample=torch.zeros(2, 8))
    fit(theirs, [PruneCallback({"0": 50}, schedule=lin)])
    assert ours[0].out_features == 8 and step.report[0]["reached"]
    check_same(ours, theirs)


# ---------------------------------------------------------------- loops of every kind


def test_accumulated_gradients_in_half_precision_with_a_scaler():
    """Once for each update; steps that the scaler skips change nothing, and dropped weights stay away."""
    net = new_net()
    opt, scaler, skipped = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=4.0), 0
    with hold(net, plans["both"], lin, N_BATCHES) as step:
        for i, (x, y) in enumerate(batches()):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(net(x), y) / 2
            scaler.scale(loss * (float("inf") if i in (5, 12) else 1)).backward()
            if not i % 2:
                continue
            floats = step.holders["quantization"].floats["0"].clone()
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            step()
            if scaler.get_scale() < before:
                skipped += 1
                kept = net[0].weight != 0
                assert torch.equal(step.holders["quantization"].floats["0"][kept], floats[kept])
            opt.zero_grad()
            assert on_grid(net)
    assert skipped == 2 and all(r["reached"] for r in step.report) and all(p.isfinite().all() for p in net.parameters())


def test_accumulation_is_one_large_batch():
    def run(parts):
        net = new_net()
        del net[1]  # batch norm sees the parts
        net.append(nn.Identity())
        opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        with hold(net, {"0": 80}, lin, N_BATCHES) as step:
            for x, y in batches(1):
                for a, b in zip(x.split(BS // parts), y.split(BS // parts), strict=True):
                    (F.cross_entropy(net(a), b) / parts).backward()
                opt.step()
                step()
                opt.zero_grad()
        return net

    check_same(run(1), run(4))


def test_momentum_brings_nothing_back():
    net, before = new_net(), []

    def after(i):
        gone = net[0].weight == 0
        assert all((net[0].weight[old] == 0).all() for old in before[-1:])
        before.append(gone)

    loop(net, plans["sparse"], lin, after=after)
    assert zeros(net) == [102, 24]


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager")])
def test_wrapped_models(wrap):
    plain, inner = new_net(), new_net()
    wrapped = wrap(inner)
    loop(plain, plans["both"], lin)
    loop(wrapped, plans["both"], lin)
    check_same(plain, inner)


def test_optimizers_that_nobody_can_watch():
    """A step of plain SGD by hand moves the float weights as one that PyTorch's hooks see; nested optimizers count once."""
    watched, by_hand, nested = new_net(), new_net(), new_net()
    loop(watched, plans["bits"], opt="sgd", optimizer=torch.optim.SGD(watched.parameters(), 0.1))
    with hold(by_hand, plans["bits"], None, STEPS) as step:
        for x, y in batches():
            by_hand.zero_grad()
            F.cross_entropy(by_hand(x), y).backward()
            for p in by_hand.parameters():
                p.data -= 0.1 * p.grad
            step()
    check_same(watched, by_hand)

    class Outer(torch.optim.SGD):
        def __init__(self, params, inner):
            super().__init__(params, lr=0.0)
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    loop(nested, plans["bits"], optimizer=Outer(nested.parameters(), torch.optim.SGD(nested.parameters(), 0.1)))
    check_same(watched, nested)


def test_a_schedule_by_epochs():
    """The level moves by the first step of an epoch, and what is there at the end of an epoch was trained at that level."""
    seen, net = [], new_net()
    loop(net, {"0": 80}, lin, after=lambda i: seen.append(zeros(net)[0]), every=N_BATCHES)
    assert seen == [51] * N_BATCHES + [102] * N_BATCHES


# ---------------------------------------------------------------- the end of the block


def said(f):
    """Warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
    return [str(w.message) for w in found]


def test_the_end_says_what_was_missed():
    assert not said(lambda: loop(new_net(), plans["both"], lin))
    [early] = said(lambda: loop(new_net(), plans["sparse"], lin, steps=5))
    assert early.startswith("step() was called 5 times, and total_steps is 24; ") and "'0' has 19.53 % of 80 %" in early
    [settled] = said(lambda: loop(new_net(), plans["sparse"], Schedule(lin.f, 0, 0.2), steps=20))
    assert settled == "step() was called 20 times, and total_steps is 24"
    [late] = said(lambda: loop(new_net(), plans["sparse"], lin, total=20))
    assert late.endswith("the last 4 steps were trained as compressed as it gets")
    net, start = new_net(), new_net().state_dict()
    [put_in] = said(lambda: loop(net, plans["both"], lin, after=lambda i: i == STEPS - 1 and net.load_state_dict(start)))
    assert put_in.startswith("weights were put in after the last step() that sparsity and quantization") and zeros(net)[0] >= 102 and on_grid(net)


def test_a_last_step_that_was_forgotten():
    net = new_net()
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.warns(UserWarning, match="step\\(\\) was called 0 times, and an optimizer took 1 steps"):
        with hold(net, plans["bits"], None, STEPS):
            F.cross_entropy(net(rows()[0]), rows()[1]).backward()
            opt.step()
            assert not on_grid(net)
    assert on_grid(net)


@pytest.mark.parametrize("where", ["forward", "step", "block", "start"])
def test_errors_leave_a_plain_model(where):
    net, n_hooks, keys = new_net(), len(_global_optimizer_pre_hooks), list(new_net().state_dict())

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            if where == "step":
                raise ArithmeticError

    def after(i):
        if where == "block" and i == 10:
            raise ArithmeticError

    plan = plans["both"] if where != "start" else Plan(sparsity={"0": 80}, quantization={"0": 4, "3": 3})
    how = dict(criteria=movement.since({})) if where == "start" else {}
    if where == "forward":
        net.register_forward_hook(lambda *_: (_ for _ in ()).throw(ArithmeticError()))
    with pytest.raises((ArithmeticError, KeyError, ValueError)):
        loop(net, plan, lin, after=after, optimizer=Fails(net.parameters(), lr=0.1, momentum=0.9), **how)
    net._forward_hooks.clear()
    assert len(_global_optimizer_pre_hooks) == n_hooks and list(net.state_dict()) == keys
    if where == "start":
        check_same(net, new_net())
    else:
        assert on_grid(net)
        loop(net, plans["both"], lin)  # and can be trained again


def test_closures():
    net = new_net()
    opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    x, y = rows()

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    with hold(net, {"0": 80}, lin, 4) as step:
        for _ in range(4):
            opt.step(closure)
            step()
    assert zeros(net)[0] == 102
    with pytest.raises(ValueError):
        with hold(net, plans["bits"], None, 4):
            opt.step(closure)
    assert on_grid(net) and zeros(net)[0] >= 102


# ---------------------------------------------------------------- going on later


@pytest.mark.parametrize("opt", ["sgd", "adam"])
@pytest.mark.parametrize("name", plans)
def test_a_training_goes_on_to_the_bit(name, opt, tmp_path):
    whole, half = new_net(), new_net()
    loop(whole, plans[name], lin, opt)
    first = optimizers[opt](half.parameters(), lr=0.05)
    todo = list(batches())

    def train(net, optimizer, some, step):
        for x, y in some:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            step()

    with pytest.raises(KeyboardInterrupt), hold(half, plans[name], lin, STEPS) as step:
        train(half, first, todo[:9], step)
        torch.save(dict(net=half.state_dict(), opt=first.state_dict(), step=step.state_dict()), tmp_path / "half.pt")
        raise KeyboardInterrupt
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    again = new_net()
    again.load_state_dict(saved["net"])
    second = optimizers[opt](again.parameters(), lr=0.05)
    second.load_state_dict(saved["opt"])
    with hold(again, plans[name], lin, STEPS, state=saved["step"]) as step:
        train(again, second, todo[9:], step)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), whole.state_dict().values(), strict=True))


# ---------------------------------------------------------------- methods without a holder of their own


@pytest.fixture
def clipping():
    """A method from outside: it clips the highest percent of the weights."""

    class Held:
        def __init__(self, limits):
            self.limits = limits

        def hold(self):
            for unit, most in self.limits.items():
                unit.weight.data.clamp_(-most, most)

    @method("clipping")
    @dataclass(frozen=True)
    class Clipped(Perturbation):
        level: float = 50

        def change(self, model, unit):
            most = unit.weight.detach().abs().quantile(1 - self.level / 100)
            unit.weight.data.clamp_(-most, most)

        @classmethod
        def apply(cls, model, targets, **_):
            limits = {}
            for unit, level in target_units(model, targets).items():
                cls(level).change(model, unit)
                limits[unit] = unit.weight.detach().abs().max().item()
            return Held(limits)

    yield Clipped
    del methods["clipping"]


def test_a_method_from_outside(clipping):
    """Its level rises along the schedule, it is held after each step, also in a plan with one of ours."""
    net, most = new_net(), []
    plan = Plan(clipping={"0": 50}, sparsity={"3": 50})

    def after(i):
        most.append((net[0].weight == net[0].weight.max()).sum().item() + (net[0].weight == net[0].weight.min()).sum().item())

    step = loop(net, plan, lin, after=after)
    assert zeros(net)[1] == 24 and all(r["reached"] for r in step.report if r["target"])
    assert most[-1] > 30 > most[2]


def test_two_layers_in_the_place_of_one():
    """Low rank comes at the start of the block; an optimizer that was made before is found out."""
    low = next(name for name, kind in methods.items() if kind.remakes)
    net = new_net()
    step = loop(net, Plan({low: {"0": 30}, "sparsity": {"3": 50}}), lin)
    assert len(net[0]) == 2 and zeros(net)[1] == 24 and all(r["reached"] for r in step.report if r["target"])
    with pytest.raises(ValueError):
        net = new_net()
        loop(net, LayerTargets({"0": 30}, method=low), lin, optimizer=torch.optim.SGD(net.parameters(), 0.1))


def test_channels_go_first_beside_others():
    net = new_net()
    step = loop(net, Plan(pruning={"0": 50}, sparsity={"3": 50}), lin, sample=torch.zeros(2, 8))
    assert net[0].out_features == 8 and zeros(net)[1] == 12
    assert [r["reached"] for r in step.report if r["layer"] == "3" and r["target"]] == [True]


@pytest.mark.parametrize("schedule", [one_shot, lin])
def test_errors_at_the_door(schedule):
    net = new_net()
    for bad, error in [
        (dict(targets={"first": 50}), KeyError),
        (dict(targets=50, compression="sparsly"), KeyError),
        (dict(targets=BitPlan({"0": 4}), compression="sparsity"), ValueError),
        (dict(targets=50, total_steps=0), ValueError),
        (dict(targets=50, bits=3), TypeError),
        (dict(targets=50, schedule="agp"), TypeError),
        (dict(targets=LayerTargets({"0": 50}, method="pruning")), ValueError),
    ]:
        with pytest.raises(error), hold(net, **dict(schedule=schedule, total_steps=10) | bad):
            raise AssertionError("it began")
    check_same(net, new_net())


# ---------------------------------------------------------------- two processes


def in_one_of_two(out):
    """Half of each batch, wrapped for distributed training; random masks are chosen by the first process."""
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ends = torch.distributed.get_rank(), {}
    for name in plans:
        net = new_net()
        net[1] = nn.Identity()  # batch norm sees half of a batch
        ddp = DistributedDataParallel(net)
        opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        with hold(ddp, plans[name], lin, STEPS) as step:
            for x, y in batches():
                opt.zero_grad()
                half = slice(rank * BS // 2, (rank + 1) * BS // 2)
                F.cross_entropy(ddp(x[half]), y[half]).backward()
                opt.step()
                step()
        ends[name] = net.state_dict()
    net = DistributedDataParallel(new_net())
    try:
        with hold(net, LayerTargets({"0": 50}, method="pruning"), lin, 4, optimizer=opt):
            pass
    except ValueError as e:
        ends["refused"] = str(e)
    ends["fastai"] = "fastai" in sys.modules
    torch.save(ends, Path(out) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one():
    """Both end with the same weights, those of one process on the whole batches; fastai is not imported."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        running = []
        for rank in "01":
            env = dict(os.environ, RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
            env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
            running.append(subprocess.Popen([sys.executable, __file__, out], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        try:
            said = [p.communicate(timeout=120)[0] for p in running]
        finally:
            for p in running:
                p.kill()
        assert [p.returncode for p in running] == [0, 0], "\n".join(said)
        first, second = (torch.load(Path(out) / f"{rank}.pt") for rank in "01")
    assert not first["fastai"] and "wrap the model" in first["refused"]
    for name in plans:
        alone = new_net()
        alone[1] = nn.Identity()
        loop(alone, plans[name], lin, optimizer=torch.optim.SGD(alone.parameters(), 0.05, momentum=0.9))
        assert all(torch.equal(a, b) for a, b in zip(first[name].values(), second[name].values(), strict=True))
        together = copy.deepcopy(alone)
        together.load_state_dict(first[name])
        check_same(together, alone)


if __name__ == "__main__":
    in_one_of_two(sys.argv[1])


def test_the_schedule_may_be_left_out():
    """As the help says: it is `agp` then; the number of steps may not"""
    reached = []
    for given in ({}, {"schedule": None}, {"schedule": agp}):
        net, rows = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), []
        optimizer = torch.optim.SGD(net.parameters(), .01)
        with hold(net, {"0": 50}, total_steps=4, **given) as step:
            for _ in range(4):
                net(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                step()
                rows.append((net[0].weight == 0).sum().item())
        reached.append(rows)
    assert reached[0] == reached[1] == reached[2] and reached[0][-1] == 32 and reached[0][0] > 0
    with pytest.raises(ValueError, match="total_steps"), hold(net, {"0": 50}): pass
