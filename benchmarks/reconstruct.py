"""What refitting is worth: plans carried out without and with `reconstruct`, no training after, batch norm as it was, scored on data that nothing else has seen.

    python benchmarks/reconstruct.py resnet18 mobilenet transformer --zeros 80 90 --bits 3 4 --plans uniform lamp search --seeds 0 1 2
"""
import argparse
import copy
import time
import warnings

import torch
from tasks import scores, tasks

from fasterai_sens import Plan, SensitivityAnalyzer, search_plan
from fasterai_sens.plans.applier import Applier
from fasterai_sens.plans.baselines import lamp, uniform


def held_out(model, task):
    """Score on the data that nothing else has seen"""
    x, y = task.held_out
    with torch.no_grad():
        return scores(model(x), y, task.text).mean().item()


def searched(task, method, target, levels, data, reconstruct):
    """The plan that `search_plan` finds within the bytes or weights of `target`, measured without and with refitting as it will be carried out"""
    analyzer = SensitivityAnalyzer(task.model, task.measure[0][:2], task.measure, calibration_data=data)
    sweep = analyzer.sweep(method, levels, reconstruct=reconstruct, verbose=False)
    return search_plan(task.model, task.measure[0][:2], task.measure, sweep, target, calibration_data=data, evaluations=120, verbose=False).plan


def zeros_plan(name, task, pct, data, reconstruct):
    """Targets in percent with that mean over all weights"""
    if name in ("uniform", "lamp"):
        return Plan(sparsity={"uniform": uniform, "lamp": lamp}[name](task.model, pct))
    applier = Applier(task.model, task.measure[0][:2])
    most = applier.costs(Plan(sparsity=uniform(task.model, pct)), ("params",))
    return searched(task, "sparsity", most, [30, 50, 60, 70, 80, 85, 90, 95, 98], data, reconstruct)


def bits_plan(name, task, bits, data, reconstruct):
    """The same bits for every layer, or as many bytes as that takes"""
    units = Applier(task.model, task.measure[0][:2]).units
    plan = Plan(quantization=dict.fromkeys([u.name for u in dict.fromkeys(units.values())], bits))
    if name == "uniform": return plan
    if name == "lamp": return None
    most = Applier(task.model, task.measure[0][:2]).costs(plan, ("bytes",))
    return searched(task, "quantization", most, [8, 6, 5, 4, 3, 2], data, reconstruct)


makers = {"zeros": zeros_plan, "bits": bits_plan}


def cell(task, kind, level, name, data):
    """Held-out scores of a plan, cut and refitted, and the seconds that refitting takes"""
    found = {}
    for way, reconstruct in (("cut", None), ("refitted", True)):
        plan = makers[kind](name, task, level, data, reconstruct)
        if plan is None: return None
        model, start = copy.deepcopy(task.model), time.perf_counter()
        plan.apply(model, task.measure[0][:2], calibration_data=data, reconstruct=data if reconstruct else False)
        found[way], found["seconds"] = held_out(model, task), time.perf_counter() - start
    return found


def main():
    """One line for each cell"""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("tasks", nargs="+", choices=[name for name in tasks if name != "mlp"])
    p.add_argument("--zeros", nargs="*", type=float, default=[], help="percent")
    p.add_argument("--bits", nargs="*", type=int, default=[])
    p.add_argument("--plans", nargs="*", default=["uniform", "lamp"], choices=["uniform", "lamp", "search"])
    p.add_argument("--seeds", nargs="*", type=int, default=[0])
    p.add_argument("--samples", type=int, default=300, help="of the training data, to refit on")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    for task_name in args.tasks:
        for seed in args.seeds:
            torch.manual_seed(seed)
            task = tasks[task_name](seed)
            inputs = task.train[0]
            chosen = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(5))[: args.samples]
            data = list(inputs[chosen].split(100))
            print(f"{task_name} seed {seed}: dense {held_out(task.model, task):.4f}", flush=True)
            for kind, levels in (("zeros", args.zeros), ("bits", args.bits)):
                for level in levels:
                    for name in args.plans:
                        found = cell(task, kind, level, name, data)
                        if found: print(f"  {kind} {level:g} {name}: " + ", ".join(f"{k} {v:.4f}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
