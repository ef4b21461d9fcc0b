"""The command as a user types it: results on stdout, progress on stderr, an exit code for each way to end."""
import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from fasterai_sens.all import SweepResult, describe_compressed, load_compressed
from fasterai_sens.core.protocol import methods
from fasterai_sens.show.terminal import main, read_any, set_up

job = """
import time
import torch
from torch import nn
from beside import width

def job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)).eval()
    x = torch.randn(200, 8)
    with torch.no_grad(): y = model(x).argmax(1)
    def accuracy(model): return (model(x).argmax(1) == y).float()
    return model, x[:1], accuracy

def slow():
    model, x, accuracy = job()
    def one_by_one(model):
        time.sleep(.3)
        return accuracy(model)
    return model, x, one_by_one

def failing():
    model, x, accuracy = job()
    calls = []
    def fails_later(model):
        calls.append(1)
        if len(calls) > 2: raise RuntimeError("the disk is full")
        return accuracy(model)
    return dict(model=model, sample=x, eval_fn=fails_later, metric_name="hits", reuse=False)

def smallest_stay():
    from fasterai_sens.all import small_final
    model, x, accuracy = job()
    return dict(model=model, sample=x, eval_fn=accuracy, criteria=small_final)
"""

@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a job, as the working directory"""
    (tmp_path/"job.py").write_text(job)
    (tmp_path/"beside.py").write_text("width = 16")
    monkeypatch.chdir(tmp_path)
    return tmp_path


command = [sys.executable, "-c", "import sys; from fasterai_sens.show.terminal import main; sys.exit(main())"]

def test_from_sweep_to_file(here):
    """In processes of its own: a sweep that others can read, a plan of it within its budget, a model as small, a page."""
    found = subprocess.run([*command, "sweep", "job.py", "--method", "quantization", "--levels", "3", "4", "8", "--out", "bits.json", "--json"],
        capture_output=True, text=True, check=True)
    assert SweepResult.from_json("bits.json").levels == [3, 4, 8]
    assert json.loads(found.stdout)["results"][0]["compression_type"] == "quantization"
    main(["sweep", "job.py", "--levels", "50", "90", "--out", "zeros.json"])
    code = main(["plan", "bits.json", "zeros.json", "--job", "job.py", "--budget", "bytes=40%", "--out", "plan.json", "--save", "small.safetensors"])
    plan = read_any("plan.json")
    assert code == 0 and plan.costs["bytes"] <= .4*plan.whole["bytes"]
    load_compressed("small.safetensors", set_up("job.py")["model"])
    assert main(["report", "bits.json", "plan.json", "--page", "a.html"]) == 0 and "bits" in (here/"a.html").read_text()

def test_plans_take_what_the_job_says(here):
    """A plan, and its file, drop the weights that were dropped where it was measured."""
    assert main(["sweep", "job.py:smallest_stay", "--levels", "50", "--out", "odd.json"]) == 0
    call = ["plan", "odd.json", "--job", "job.py:smallest_stay", "--budget", "params=60%", "--save", "odd.safetensors"]
    assert main(call) == 0
    model = set_up("job.py")["model"]
    before = [p.detach().abs().clone() for p in model.parameters() if p.ndim == 2]
    load_compressed("odd.safetensors", model)
    after = [p for p in model.parameters() if p.ndim == 2 and (p == 0).any()]
    assert after
    for old, new in zip(before, (p for p in model.parameters() if p.ndim == 2), strict=True):
        if (new == 0).any(): assert old[new == 0].min() >= old[new != 0].max()

def test_written_files_say_their_size(here, capsys):
    """The model's file is named with its bytes, on stderr; stdout is the plan alone."""
    assert main(["sweep", "job.py", "--levels", "50", "90", "--out", "zeros.json"]) == 0
    capsys.readouterr()
    assert main(["plan", "zeros.json", "--job", "job.py", "--budget", "bytes=60%", "--save", "small.safetensors", "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"small.safetensors: {(here/'small.safetensors').stat().st_size:,} bytes" in err
    assert json.loads(out)["costs"]["bytes"] < 60/100*json.loads(out)["whole"]["bytes"]

def test_files_of_models_are_described(here, capsys):
    """A table with a row for each tensor and their sum, or the rows as JSON, which are those of `describe_compressed`."""
    main(["sweep", "job.py", "--method", "quantization", "--levels", "3", "8", "--out", "bits.json"])
    main(["plan", "bits.json", "--job", "job.py", "--budget", "bytes=30%", "--save", "small.safetensors"])
    capsys.readouterr()
    assert main(["describe", "small.safetensors"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    rows = describe_compressed("small.safetensors")
    assert head.split()[:6] == ["tensor", "shape", "written", "method", "level", "bytes"]
    assert [line.split()[0] for line in lines] == [row["tensor"] for row in rows] == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert "16 x 8" in lines[0] and "quantization" in lines[0] and len({line.rfind(".") for line in lines}) == 1
    n, whole = sum(sum(row["bytes"].values()) for row in rows), sum(row["before"] for row in rows)
    assert last.startswith("all 6") and f" {n:,} " in last and f" {whole:,} " in last
    assert main(["describe", "small.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(rows))

def test_pages_are_asked_for_as_other_files(here, capsys):
    """`--out` as everywhere, more than one; the older word still goes; a page that nobody named takes the place of none."""
    assert main(["analyze", "job.py", "--levels", "50", "--out", "a.json"]) == 0
    capsys.readouterr()
    assert main(["report", "a.json", "--out", "b.html", "--out", "c.html"]) == 0
    assert capsys.readouterr().out == "b.html\nc.html\n"
    assert main(["report", "a.json", "--page", "d.html"]) == 0
    assert len({(here/name).read_text() for name in ("b.html", "c.html", "d.html")}) == 1
    (here/"report.html").write_text("a page of somebody else")
    assert main(["report", "a.json"]) == 2
    assert (here/"report.html").read_text() == "a page of somebody else" and "report.html is there already" in capsys.readouterr().err
    assert main(["report", "a.json", "--out", "report.html"]) == 0 and "<html" in (here/"report.html").read_text()
    (here/"report.html").unlink()
    assert main(["report", "a.json"]) == 0 and (here/"report.html").exists()

def test_progress_and_results_apart(here, capsys):
    """What is printed while it works is not on stdout."""
    assert main(["analyze", "job.py:slow", "--levels", "50", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["layers"]) == 3
    assert "3/3" in err or "100" in err

@pytest.mark.parametrize("args,code,words", [
    (["sweep", "job.py:failing"], 1, "the disk is full"),
    (["sweep", "job.py", "--method", "sparsty"], 2, "sparsity"),
    (["sweep", "job.py", "--set", "granularty=row"], 2, "granularity"),
    (["sweep", "job.py", "--layers", "9"], 2, "'9'"),
    (["sweep", "other.py"], 2, "other.py"),
    (["sweep", "job.py:other"], 2, "other"),
    (["sweep", "job.py", "--out", "a.txt"], 2, "a.txt"),
    (["plan", "job.py", "--job", "job.py", "--budget", "bytes=30%"], 2, "not JSON"),
    (["report", "none.json"], 2, "none.json"),
    (["report", "none.json", "--out", "a.json"], 2, "a.json"),
    (["describe", "none.safetensors"], 2, "none.safetensors"),
    (["describe", "job.py"], 2, "job.py"),
])
def test_errors_are_one_line(args, code, words, here, capsys):
    """What came and what would do, on stderr; no traceback, nothing on stdout, and `--debug` shows all."""
    assert main(args) == code
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert not out and last.startswith("fasterai-sens: ") and words in last and "Traceback" not in err
    with pytest.raises(Exception): main(["--debug", *args])   # noqa: B017

@pytest.mark.parametrize("budget,words", [("12%", "bytes=12%"), ("size=12%", ": unknown cost 'size'; costs are params")])
def test_budgets_say_of_what(budget, words, here, capsys):
    """A share alone is no budget; the error writes one."""
    assert main(["sweep", "job.py", "--levels", "50", "--out", "a.json"]) == 0
    assert main(["plan", "a.json", "--job", "job.py", "--budget", budget]) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]

def test_budget_out_of_reach(here):
    """It has a code of its own, for scripts that try the next one."""
    assert main(["sweep", "job.py", "--levels", "50", "--out", "a.json"]) == 0
    assert main(["plan", "a.json", "--job", "job.py", "--budget", "params=2%"]) == 3

@pytest.mark.skipif(os.name == "nt", reason="signals are those of Unix")
@pytest.mark.slow
def test_interrupted_and_taken_up_again(here):
    """Ctrl-C ends with 130; the same call goes on with its journal."""
    call = [*command, "sweep", "job.py:slow", "--levels", "20", "40", "60", "80", "--journal", "j.jsonl", "--set", "reuse=False"]
    def listen(): signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listen)
    begin = time.monotonic()
    while not ((here/"j.jsonl").exists() and len((here/"j.jsonl").read_text().splitlines()) > 4):
        assert process.poll() is None and time.monotonic() - begin < 120
        time.sleep(.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    n = len((here/"j.jsonl").read_text().splitlines())
    assert main([*call[3:], "--out", "a.json"]) == 0
    again = len((here/"j.jsonl").read_text().splitlines())
    assert n < again and len(read_any("a.json").names) == 3
    assert main([*call[3:], "--out", "b.json"]) == 0
    assert len((here/"j.jsonl").read_text().splitlines()) == again and read_any("a.json") == read_any("b.json")

def test_help_teaches(capsys):
    """Every command, every method and every exit code is in it, and what holds where nothing is said."""
    def help_of(*command):
        with pytest.raises(SystemExit) as e: main([*command, "--help"])
        assert e.value.code == 0
        return " ".join(capsys.readouterr().out.split())
    text = help_of() + help_of("sweep")
    for word in (*methods, "analyze", "estimate", "plan", "report", "describe", "130", "bytes=30%"): assert word in text
    job_is, of_method = "the function is called job if none is named", "(default: sparsity)"
    for command, words in dict(
        analyze=[job_is, of_method, "(default: 50 percent or 8 bits)", "granularity=weight", "repeats=1", "metric_name=accuracy"],
        sweep=[job_is, of_method, "(default: 25 50 75 90 percent or 8 6 4 3 2 bits)", "quant_per_channel=True", "early_stop_mode=None"],
        estimate=[job_is, of_method, "by=fisher"],
        plan=[job_is, "combine=()", "locked=()", "latency="],
        report=["--out", "(default: report.html, if there is none yet)"],
    ).items():
        text = help_of(command)
        for word in words: assert word in text, (command, word)
    assert "called job unless" in help_of()
    with pytest.raises(SystemExit) as e: main(["measure"])
    assert e.value.code == 2

def test_defaults_in_the_help_are_those_that_hold(here):
    """A sweep without `--method` and `--levels` is the one that the help speaks of."""
    assert main(["sweep", "job.py", "--out", "a.json"]) == 0
    found = read_any("a.json")
    assert (found[0].compression_type, list(found.levels)) == ("sparsity", [25, 50, 75, 90])


def test_verbose_says_what_happens_in_silence(here, capsys):
    """With -v stderr has what was resumed, not reused and left out; with -vv each step; without it nothing of the kind. Stdout is the same."""
    call = ["sweep", "job.py", "--levels", "50", "90", "--journal", "steps.jsonl", "--set", "verbose=False"]
    logger = logging.getLogger("fasterai_sens")
    before = logger.level, list(logger.handlers)
    said = []
    for loud in ([], ["-v"], ["-vv"]):
        assert main([*call, *loud, "--set", "reuse=False"]) == 0
        said.append(capsys.readouterr())
    assert len({printed.out for printed in said}) == 1
    silent, some, all_of_it = (printed.err for printed in said)
    assert "INFO" not in silent and "DEBUG" not in silent
    resumed = "INFO: steps.jsonl: 7 measurements are there already"   # three layers at two levels, and the untouched model
    assert resumed in some and "INFO: nothing is reused from here on: reuse=False" in some and "DEBUG" not in some
    assert resumed in all_of_it and "DEBUG: level 50: 0 " in all_of_it
    assert (logger.level, logger.handlers) == before

    assert main(["-v", "analyze", "job.py", "--method", "pruning", "--levels", "50"]) == 0
    assert "INFO: 4 is left out at level 50: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_log_is_quiet_until_somebody_asks():
    """In a process without any handler nothing of the log is on stderr; with `basicConfig` it is."""
    code = ("import logging, torch; from torch import nn; from fasterai_sens import analyze_sensitivity; {}; torch.manual_seed(0); "
            "analyze_sensitivity(nn.Linear(4, 2), torch.ones(1, 4), lambda m: float(m.weight.sum()), verbose=False)")
    for asked, expected in (("pass", False), ("logging.basicConfig(level=logging.INFO)", True)):
        found = subprocess.run([sys.executable, "-W", "ignore", "-c", code.format(asked)], capture_output=True, text=True, check=True)
        assert ("nothing is reused" in found.stderr) == expected
