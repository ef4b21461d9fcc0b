"""How often 95 % intervals of the mean damage hold the truth.

    .venv/bin/python benchmarks/intervals.py [--repetitions 4000]

Each case is drawn again and again, and the share of intervals that hold the true mean is counted: of Student's t, of bootstrap-t and BCa (999 resamples, the same ones for
all draws), and of `paired_interval`, which the library uses. With 4000 repetitions a share of .95 has a standard error of .0034. `width` is the mean width over that of
Student's t; `withheld` is the share of draws for which there is no interval (for bootstrap-t: an end is infinite), which are not counted as either. Accuracies are named by the share of samples
lost and won. Below, tokens in sequences, with the token and with the sequence as the sample.
"""
import argparse
from time import perf_counter

import numpy as np
import pandas as pd
from scipy.stats import norm
from scipy.stats import t as student

from fasterai_sens.measure.intervals import mean_interval, paired_interval, sequence_scores

RESAMPLES = 999   # 2.5 % of 1000 are whole numbers of them


# ---- what is drawn: (generator, shape) -> damage, and its true mean

def sparse(draw, share):
    """Nothing for most samples, and what `draw` says for some."""
    return lambda rng, shape: draw(rng, shape)*(rng.random(shape) < share)


def lognormal(sigma):
    return lambda rng, shape: rng.lognormal(0, sigma, shape)


def either_sign(rng, shape):
    return np.where(rng.random(shape) < .7, 1, -1)*rng.lognormal(0, 1, shape)


def unequal(rng, shape):
    """A tenth of the samples varies ten times as much."""
    return rng.normal(.3, 1, shape)*np.where(rng.random(shape) < .1, 10, 1)


def thirds(rng, shape):
    """Of three labels some become wrong, some right."""
    return rng.choice([-1/3, 0, 1/3, 2/3], shape, p=[.02, .9, .05, .03])


MAIN = {
    "normal": (lambda rng, shape: rng.normal(.3, 1, shape), .3),
    "exponential": (lambda rng, shape: rng.exponential(1, shape), 1.),
    "lognormal": (lognormal(1), np.exp(.5)),
}
FURTHER = {
    "lognormal, sigma 1.5": (lognormal(1.5), np.exp(1.125)),
    "lognormal, sigma 2": (lognormal(2), np.exp(2)),
    "minus exponential": (lambda rng, shape: -rng.exponential(1, shape), -1.),
    "5 % lognormal, else 0": (sparse(lognormal(1), .05), .05*np.exp(.5)),
    "t, 3 degrees": (lambda rng, shape: rng.standard_t(3, shape), 0.),
    "lognormal, either sign": (either_sign, .4*np.exp(.5)),
    "unequal variance": (unequal, .3*1.9),
    "uniform": (lambda rng, shape: rng.random(shape), .5),
    "thirds": (thirds, .03),
}
ACCURACIES = ((.003, 0.), (.01, 0.), (.01, .005), (.03, .01))


# ---- the candidates: damage [draws, n] -> ends of the intervals, NaN where there is none

def resampled(d, weights):
    """Means and standard deviations of all resamples of standardised damage, `[draws, resamples]`."""
    n = d.shape[1]
    with np.errstate(invalid="ignore", divide="ignore"): away = (d - d.mean(1, keepdims=True))/d.std(1, ddof=1, keepdims=True)
    means = away@weights.T/n
    squares = (away*away)@weights.T/n
    return means, np.sqrt(np.maximum(squares - means**2, 0)*n/(n - 1)), away


def by_t(d):
    half = student.ppf(.975, d.shape[1] - 1)*d.std(1, ddof=1)/d.shape[1]**.5
    return d.mean(1) - half, d.mean(1) + half


def by_bootstrap_t(d, means, spreads):
    scale = d.std(1, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"): ratio = np.sort(np.where(spreads > 1e-7, means/spreads, np.sign(np.round(means, 9))*np.inf), 1)
    k = round(.025*(RESAMPLES + 1))
    with np.errstate(invalid="ignore"): ends = d.mean(1) - ratio[:, -k]*scale, d.mean(1) - ratio[:, k - 1]*scale
    known = np.isfinite(ends[0]) & np.isfinite(ends[1])
    return tuple(np.where(known, end, np.nan) for end in ends)


def by_bca(d, means, away):
    below = (means < 0).mean(1) + .5*(means == 0).mean(1)
    bias = norm.ppf(below.clip(1/RESAMPLES, 1 - 1/RESAMPLES))
    with np.errstate(invalid="ignore"): acceleration = (away**3).sum(1)/(6*(away**2).sum(1)**1.5)
    ordered, ends = np.sort(means, 1), []
    for z in norm.ppf([.025, .975]):
        share = norm.cdf(bias + (bias + z)/(1 - acceleration*(bias + z)))
        place = np.nan_to_num(share*(RESAMPLES + 1) - 1).round().astype(int).clip(0, RESAMPLES - 1)
        ends.append(d.mean(1) + d.std(1, ddof=1)*ordered[np.arange(len(d)), place])
    return tuple(ends)


def by_library(base, other):
    rows = [paired_interval(b, o)[0] or (np.nan, np.nan) for b, o in zip(base, other, strict=True)]
    return tuple(np.array(rows).T)


# ---- tables

def measure(case, n, base, other, truth, weights):
    """One row of the table."""
    d = base - other
    means, spreads, away = resampled(d, weights)
    found = {"t": by_t(d), "bootstrap-t": by_bootstrap_t(d, means, spreads), "BCa": by_bca(d, means, away), "ours": by_library(base, other)}
    usual, row = found["t"][1] - found["t"][0], {"case": case, "n": n}
    for name, (low, high) in found.items():
        given = ~np.isnan(low)
        row[name] = ((low <= truth) & (truth <= high))[given].mean() if given.any() else np.nan
        row[f"{name} width"] = (high - low)[given].mean()/usual.mean() if given.any() and usual.any() else np.nan
        row[f"{name} withheld"] = 1 - given.mean()
    return row


def accuracy_draws(rng, shape, lost, won):
    """Right and wrong before and after, where 90 % were right."""
    fate, right = rng.random(shape), rng.random(shape) < .9
    base = np.where(fate < lost, 1., np.where(fate < lost + won, 0., right))
    return base, np.where(fate < lost, 0., np.where(fate < lost + won, 1., right))


def rows_of(repetitions, sizes, further_sizes, rng):
    """All cases, those with the same n one after the other, for they share resamples."""
    for n in (3, 5, 10, 20, 100, 300, 1000):
        own = np.random.default_rng(n)
        weights = np.stack([np.bincount(own.integers(0, n, n), minlength=n) for _ in range(RESAMPLES)]).astype(float)
        for lost, won in ACCURACIES if n in (100, 300, 1000) else ():
            yield "1 accuracy", measure(f"{lost:g} / {won:g}", n, *accuracy_draws(rng, (repetitions, n), lost, won), lost - won, weights)
        for group, cases, some in (("2 damage", MAIN, sizes), ("3 further", FURTHER, further_sizes), ("4 few samples", MAIN, (3, 5, 10))):
            for case, (draw, truth) in cases.items() if n in some else ():
                base = rng.exponential(1, (repetitions, n)) if case.startswith("5 %") else np.zeros((repetitions, n))
                yield group, measure(case, n, base, base - draw(rng, (repetitions, n)), truth, weights)


def sequences(repetitions, rng):
    """Coverage with tokens and with sequences as samples; of 64 tokens each, or of 16 to 112, where longer ones lose more."""
    for ragged in (False, True):
        for n in (20, 50, 100):
            held = {"tokens": 0, "sequences": 0}
            for _ in range(repetitions):
                lengths = rng.integers(16, 113, n) if ragged else np.full(n, 64)
                effect = rng.exponential(1, n) + .01*(lengths - 64)
                tokens = np.repeat(effect, lengths) + rng.normal(0, 1, lengths.sum())
                sums = np.add.reduceat(tokens, np.r_[0, lengths[:-1].cumsum()])
                truth = 1 + .01*784/64*ragged   # the variance of 16..112 is 784: a mean over tokens counts long sequences more
                for unit, d in (("tokens", tokens), ("sequences", sequence_scores(sums, lengths))):
                    low, high = mean_interval(d)
                    held[unit] += low <= truth <= high
            yield {"sequences": n, "tokens each": "16 to 112" if ragged else "64", **{f"{unit} as samples": k/repetitions for unit, k in held.items()}}


def main():
    """Draw, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=4000, help="draws of each case")
    args = parser.parse_args()
    rng, start = np.random.default_rng(0), perf_counter()
    found = list(rows_of(args.repetitions, (20, 100, 1000), (20, 100, 1000), rng))
    shown = ["case", "n", "t", "bootstrap-t", "BCa", "ours", "bootstrap-t width", "BCa width", "ours width", "bootstrap-t withheld", "ours withheld"]
    for group in sorted({g for g, _ in found}):
        table = pd.DataFrame([row for g, row in found if g == group])[shown].sort_values(["case", "n"], kind="stable")
        print(f"\n{group[2:]}\n\n{table.to_string(index=False, float_format=lambda v: f'{v:.3f}', na_rep='-')}")
    print(f"\ntokens\n\n{pd.DataFrame(sequences(args.repetitions, rng)).to_string(index=False, float_format=lambda v: f'{v:.3f}')}")
    print("\nmilliseconds for one interval")
    for n in (1000, 100_000):
        d = rng.exponential(1, n)
        began = perf_counter()
        for _ in range(20): paired_interval(d, 0*d)
        print(f"  n = {n:,}: {50*(perf_counter() - began):.2f}")
    print(f"{perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
