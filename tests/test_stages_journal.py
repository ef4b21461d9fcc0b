"""Stages in a journal: whatever ends them, the next call goes on where they stopped, and leaves the weights that an undisturbed one leaves."""
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastai.callback.core import Callback
from recovery_script import learner, run

from fasterai_sens import changes, fingerprint, gradual_degradation_recovery, taylor
from fasterai_sens.core.journal import Journal
from fasterai_sens.methods.criteria import updating_movement

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")
script = Path(__file__).with_name("recovery_script.py")
n_stages, n_batches = 4, 2 * 4   # of each stage


class Ends(BaseException):
    """What no code of ours catches"""


class EndAt(Callback):
    """Ends at a batch, counted over all stages"""
    def __init__(self, at=None): self.at, self.n = at, 0
    def after_batch(self):
        self.n += self.training
        if self.n == self.at: raise Ends


def n_trained(path):
    """On how many batches was trained"""
    return len(path.read_text()) if path.exists() else 0


ways = {
    "sparsity": dict(method="sparsity"),
    "pruning": dict(method="pruning"),
    "low rank": dict(method="low_rank"),
    "criteria on data": dict(method="pruning", criteria=taylor),
    "criteria on what moved": dict(method="sparsity", criteria=updating_movement.since(learner().model.state_dict())),
    "a stage that loses too much": dict(method="sparsity", max_drop=.1, stages=(25, 50, 60, 99), epochs=[2, 2, 2, 0]),
}


@pytest.mark.parametrize("options", [pytest.param(ways[name], id=name, marks=[pytest.mark.slow]*(name not in ("pruning", "sparsity"))) for name in ways])
def test_ended_anywhere(options, tmp_path):
    """Ended in each stage in turn: the same numbers and the same weights, to the bit, also with other random numbers; no stage is trained twice"""
    whole, fits = tmp_path / "whole", tmp_path / "fits"
    expected = run(journal=None, fits=whole, cbs=[EndAt()], **options)
    n = n_trained(whole)
    assert n == (24 if "epochs" in options else n_stages * n_batches)
    for seed, at in enumerate((3, 2 * n_batches, n_batches + 1)):   # of what is left; in the first stage, in the second, in the third
        before = n_trained(fits)
        with pytest.raises(Ends):
            run(journal=tmp_path / "run", fits=fits, seed=seed, cbs=[EndAt(at)], **options)
        assert n_trained(fits) == before + at
    done = n_trained(fits)
    assert run(journal=tmp_path / "run", fits=fits, seed=7, cbs=[EndAt()], **options) == expected
    assert n_trained(fits) - done == n - 2 * n_batches
    done = n_trained(fits)
    assert run(journal=tmp_path / "run", fits=fits, seed=8, cbs=[EndAt()], **options) == expected
    assert n_trained(fits) == done   # all of it was known
    assert not list(tmp_path.glob("*.new"))


def test_what_is_damaged_is_named(tmp_path):
    """A missing or damaged file is an error before anything changes; a torn line is a stage that is done again"""
    path, fits = tmp_path / "run", tmp_path / "fits"
    expected = run("sparsity", path, fits)
    content, second = path.read_bytes(), tmp_path / "run.stage2.safetensors"
    weights, third = second.read_bytes(), (tmp_path / "run.stage3.safetensors").read_bytes()
    flipped = bytearray(weights)
    flipped[-5] ^= 1
    learn = learner()
    before = fingerprint(learn.model)
    for damaged in (None, b"", weights[:-1], bytes(flipped), b"not a file of weights at all", third):
        second.unlink(missing_ok=True)
        if damaged is not None: second.write_bytes(damaged)
        with pytest.raises(ValueError, match="run lists stage 2, but"):
            run("sparsity", path, fits)
        assert path.read_bytes() == content
    with pytest.raises(ValueError):
        gradual_degradation_recovery(learn, verbose=False, journal=path)
    assert changes(before, fingerprint(learn.model)) == []
    second.write_bytes(weights)
    for cut in random.Random(0).sample(range(len(content)), 4):
        path.write_bytes(content[:cut])
        assert run("sparsity", path, fits) == expected
        assert path.read_bytes().count(b"\n") == content.count(b"\n")


def test_what_differs_is_named_for_stages(tmp_path):
    """Arguments, weights, data and training: nothing is mixed, and the files stay as they are"""
    path, fits = tmp_path / "run", tmp_path / "fits"
    run("sparsity", path, fits, stages=(25, 50), epochs=1)
    before = {file: file.read_bytes() for file in tmp_path.iterdir() if file != fits}
    for options, word in ((dict(stages=(25, 60)), "targets"), (dict(epochs=2), "epochs"), (dict(lr=1e-3), "training lr"), (dict(method="pruning"), "method"),
                          (dict(criteria=taylor), "criteria"), (dict(max_drop=.5), "max_drop was None"), (dict(wd=.1), "wd"), (dict(cbs=[EndAt()]), "EndAt"),
                          (dict(granularity="row"), "granularity was"), (dict(layers=["0"]), "targets"), (dict(recalibrate=learner().dls.train), "recalibrate")):
        options = dict(method="sparsity", stages=(25, 50), epochs=1) | options
        with pytest.raises(ValueError, match=f"something else.*{word}"):
            run(journal=path, fits=fits, **options)
    learn = learner()
    learn.model[0].weight.data[0, 0, 0, 0] += 1e-3
    with pytest.raises(ValueError, match=r"weights 0\.weight"):
        gradual_degradation_recovery(learn, (25, 50), lr=1e-2, verbose=False, journal=path)
    with pytest.raises(ValueError, match="learner batches"):
        gradual_degradation_recovery(learner(n=48), (25, 50), lr=1e-2, verbose=False, journal=path)
    learn = learner()
    learn.dls.valid.dataset.tensors[1][:] = 0
    with pytest.raises(ValueError):
        gradual_degradation_recovery(learn, (25, 50), lr=1e-2, verbose=False, journal=path)
    with Journal(path, json.loads(path.read_bytes().splitlines()[0])["about"]), pytest.raises(ValueError, match="another process is"):
        run("sparsity", path, fits, stages=(25, 50), epochs=1)
    assert {file: file.read_bytes() for file in before} == before


def started(folder, method, seed):
    """A process that compresses in stages"""
    names = [str(folder / name) for name in ("run", "fits", "result")]
    return subprocess.Popen([sys.executable, str(script), method, *names, str(seed)], stderr=subprocess.PIPE)


def survived(method, folder, n_kills, seed=0):
    """Whether killed processes come to the result of an undisturbed one; batches of that one, and of all killed ones"""
    chance = random.Random(seed)
    for name in ("whole", "killed"): (folder / name).mkdir()
    whole, killed = folder / "whole", folder / "killed"
    _, error = started(whole, method, 0).communicate()
    assert (whole / "result").exists(), error
    n_done = 0
    for kill in range(n_kills):
        fits = killed / "fits"
        wanted, process = n_trained(fits) + chance.randint(1, 14), started(killed, method, kill)
        while process.poll() is None and n_trained(fits) < wanted: time.sleep(.0005)
        time.sleep(chance.random() * .02)   # also while a file is written
        process.send_signal(signal.SIGKILL)
        process.communicate()
        n_done += process.returncode == -signal.SIGKILL
    _, error = started(killed, method, 9).communicate()
    assert (killed / "result").exists(), error
    is_same = (whole / "result").read_text() == (killed / "result").read_text()
    return is_same, n_done, n_trained(whole / "fits"), n_trained(killed / "fits")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
@pytest.mark.parametrize("method", ["sparsity", "pruning"])
def test_stages_killed(method, tmp_path, n_kills=4):
    """Killed at random moments: weights and numbers of an undisturbed process; of each killed one at most the stage in flight is trained again"""
    is_same, n_done, n, n_all = survived(method, tmp_path, n_kills)
    assert is_same and n_done and n_all < n + n_done * n_batches + n_kills
