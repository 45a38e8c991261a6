"""launch/check_training.py names silent mistakes with their line, accuses no right script, and
changes nothing in what it watches.

The scripts run in forked processes, with the recorder in them; two tests start the command itself.
"""

import functools
import hashlib
import json
import os
import re
import signal
import sys
import xml.etree.ElementTree

import pytest
import torch
from forked import fork_ranks, variant
from started import ACTIVE, PYTHON, ROOT, TORCHRUN, end, read_until, run, start

CHECK, LONG = ROOT / "launch/check_training.py", pytest.mark.long
BASE = "docs/many_processes.py"
LINES = (ROOT / BASE).read_text().splitlines(True)


def line(begin):
    [found] = [text for text in LINES if text.strip().startswith(begin)]
    return found


SAMPLER, LOADER, WRAP, OPT = map(line, ("sampler = ", "loader = ", "model = DDP(", "optimizer = "))
DATA, EPOCHS, SET_EPOCH, LOOP = map(line, ("dataset = ", "for epoch", "sampler.set_e", "for x, y"))
MOVE, LOSS, ZERO, BACK = map(line, ("x, y = ", "loss = ", "optimizer.zero", "loss.backward"))
STEP, REDUCE, RANK_0, SAVE = map(line, ("optimizer.step", "dist.all_red", "if dist.get", "torch.save"))
GELU, SEED = "nn.GELU(),", "    torch.manual_seed(dist.get_rank())\n"
NORM, DROP = "nn.GELU(), nn.BatchNorm1d(64),", "nn.GELU(), nn.Dropout(0.1),"


def after(old, *new):
    pad = old[: len(old) - len(old.lstrip())]
    return {old: old + "".join(f"{pad}{text}\n" for text in new)}


def before(old, *new):
    return {old: after(old, *new)[old].removeprefix(old) + old}


def evaluate(arguments, mode="model.eval()"):
    return before(REDUCE, "tests = TensorDataset(inputs[:101])", mode, "with torch.no_grad():",
                  f"    [model.module(x) for x, in DataLoader(tests, 17{arguments})]", "model.train()")


# {mistake: (changes, the rule, what is said, the text of the line that is named, plain pytest?)}
MISTAKES = {
    "no DDP": ({WRAP: "", "model.module.state": "model.state"}, "apart",
               "found: .* come apart at step 1 .*no model is wrapped", STEP, True),
    "unfrozen": ({WRAP: "    model[0].requires_grad_(False)\n" + WRAP, **after(
        SET_EPOCH, "model.module[0].requires_grad_(epoch > 0)")}, "apart",
        "found: .* come apart at step 17 .*: frozen when DDP", STEP, True),
    "no_sync": ({BACK: BACK[:8] + "    loss.backward()\n", LOSS: LOSS.replace(
        "loss = ", "with model.no_sync(): loss = ")}, "apart", "found: .*no_sync", STEP, False),
    "two forwards": ({BACK: "            more = model(x).mean()\n" + BACK + BACK.replace(
        "loss", "more")}, "apart", "found: .*two forwards", STEP, False),
    "cast": (after(WRAP, "model.double(); model.float()"), "apart", "found: .*cast", STEP, False),
    "loaded by one": (after(WRAP, "if dist.get_rank() == 0: model.module.load_state_dict({k: v + 1 "
                            "for k, v in model.module.state_dict().items()})"), "apart",
                      "found: .*rank 0 alone loads", STEP, False),
    "names": ({GELU: "nn.GELU(), nn.Sequential(OrderedDict([(n, nn.Linear(64, 64)) for n in 'abab'"
               "[dist.get_rank() :][:2]])),", DATA: "    from collections import OrderedDict\n" + DATA},
              "wrappers", "found: the ranks' models are not alike", WRAP, False),  # as from a set
    "calls": ({REDUCE: REDUCE[:8] + "dist.all_reduce(loss_sum if dist.get_rank() else loss_sum"
               ".int())\n"}, "calls", "found: .*calls differ, from number 1", None, False),
    "same batches": ({SAMPLER: "", SET_EPOCH: "", "sampler=sampler": "shuffle=True"},
                     "same_batches", "found: .*train on the same batches", LOSS, True),
    "the whole set": ({SAMPLER: SEED, SET_EPOCH: "", "sampler=sampler": "shuffle=True"},
                      "whole_set", "found: each rank goes through all 1024", LOOP, False),
    "one replica": ({"Sampler(dataset)": "Sampler(dataset, 1, 0)"}, "told_wrong",
                    "found: .*told a wrong number", LOOP, False),
    "no set_epoch": ({SET_EPOCH: ""}, "order_again", "found: .*same order", LOOP, True),
    "its own parts": (after(DATA, "torch.seed()", "dataset, _ = torch.utils.data.random_split("
                            "dataset, [896, 128])"), "splits", "found: .*splits the set", None, False),
    "seeds": ({"Sampler(dataset)": "Sampler(dataset, seed=dist.get_rank())"}, "overlap",
              "found: the ranks' shares overlap", LOOP, False),
    "first batches": ({LOOP: "        for _ in range(16):\n            x, y = next(iter(loader))\n"},
                      "batches_again", "found: each step begins a new pass", None, False),
    "unequal": ({"64 // dist.get_world_size()": "32 - 16 * dist.get_rank()", LOOP: LOOP.replace(
        "in loader", "in [*loader][:16]")}, "shares",
                "question: .*differ in size", None, False),
    "nothing": ({"sampler=sampler)": "sampler=sampler, drop_last=True)", "batch_size=64": (
        "batch_size=9999")}, "empty", "found: .*yields no batch", LOOP, False),
    "eval mode": ({GELU: DROP, **before(REDUCE, "model.eval()"), EPOCHS: SEED + EPOCHS}, "modes",
                  "found: from forward 17 on, training goes on in eval", LOSS, True),
    "one seed": ({GELU: DROP}, "draws", "question: all ranks draw the same random", None, False),
    "padded": (evaluate(", sampler=DistributedSampler(tests)"),
               "evaluations", "found: .*counts 1 of 101 items twice", None, True),
    "drop_last": (evaluate(", drop_last=True"), "evaluations",
                  "found: .*leaves out 16 of 101", None, False),
    "train mode": ({GELU: NORM, **evaluate("", "model.train()")}, "evaluations",
                   "question: .*runs in train mode", None, False),
    "BatchNorm": ({GELU: NORM, **evaluate("")},
                  "evaluations", "found: BatchNorm's running values differ", None, False),
    "never cleared": ({ZERO: ""}, "gradients", "found: gradients are never cleared", STEP, True),
    "cleared late": ({ZERO: "", STEP: ZERO + STEP}, "gradients", "found: .*cleared between", STEP,
                     False),
    "nan": (after(LOSS, "loss = loss * float('nan') if epoch else loss"), "gradients",
            "found: from step 17 on, gradients are nan", STEP, False),
    "a copy": ({WRAP: "    import copy; old = copy.deepcopy(model)\n" + WRAP,
                "SGD(model": "SGD(old"}, "gradients", "found: none of the optimizer's 4", "optimizer = ", False),
    "a part": ({"SGD(model.": "SGD(model.module[2]."}, "gradients", "found: 2 trained param", None,
               False),
    "scaled": ({OPT: OPT + "    scaler = torch.amp.GradScaler('cpu')\n", BACK: (
        "            scaler.scale(loss).backward()\n            nn.utils.clip_grad_norm_(model"
        ".parameters(), 1)\n"), STEP: "            scaler.step(optimizer); scaler.update()\n"},
        "clipping", "found: .*still multiplies", None, False),
    "summed": (after(BACK, "for p in model.parameters(): dist.all_reduce(p.grad)"), "summed",
               "question: .*that DDP has averaged", None, False),
    "rates": ({"lr=0.05": "lr=0.05 + 0.01 * dist.get_rank()"}, "apart",
              "found: .*the learning rates differ: ", STEP, False),
    "schedule": (after(OPT, "s = torch.optim.lr_scheduler.StepLR(optimizer, 9)"), "schedules",
                 "found: the schedule StepLR .*never stepped", None, False),
    "made anew": (after(SET_EPOCH, OPT.strip()), "made_anew", "question: .*made anew 5", None, False),
    "all save": ({SAVE: SAVE[4:]}, "files", "found: all ranks save to one file", SAVE, True),
    "the wrapper": ({"model.module.state": "model.state"}, "files", "question: .*module", "torch.save", False),
    "by reference": ({EPOCHS: "    best = None\n" + EPOCHS, REDUCE: "        best = best or model"
                      ".module.state_dict()\n" + REDUCE, SAVE: SAVE.replace("model.module.state_dict()",
                                                                            "best")},
                     "files", "found: .*16 steps before", "torch.save", False),
    "one tensor": ({REDUCE: "        parts = [torch.zeros_like(loss_sum)] * 2\n        dist."
                    "all_gather(parts, loss_sum)\n"}, "settings", "found: .*under 2 names", None, False),
    "debugging": (before(EPOCHS, "torch.autograd.set_detect_anomaly(True)"), "settings",
                  "found: debugging is on", None, False),
    "slow rank": (after(STEP, "import time; time.sleep(0.02 * dist.get_rank())"), "times",
                  "found: rank 0 waits for rank 1 .*\n.*longer in its own code", None, False),
    "slow loader": (before(DATA, "import time", "class Slow(TensorDataset):",
                           "    def __getitem__(self, i): return time.sleep(0.001), super()."
                           "__getitem__(i)[1]") | {"TensorDataset(inputs,": "Slow(inputs,",
                    MOVE: "            x = y.expand(-1, 10)\n"}, "times",
                    "found: rank 0 waits for its loader", None, False),
    "slow disk": (after(STEP, "if not dist.get_rank(): torch.save(torch.ones(2_000_000), 'big.pt')"),
                  "times", "found: rank 0 saves for", None, False),
}
RIGHT = {  # scripts in styles that look like mistakes: changes of the same script
    "as it is": {},
    "local SGD": {WRAP: "", "model.module.state": "model.state", STEP: STEP + (
        "            n = optimizer.__dict__.setdefault('n', []); n.append(0)\n"
        "            if len(n) % 5 == 0:\n"
        "                for p in model.parameters(): dist.all_reduce(p.data); p.data /= 2\n")},
    "two optimizers": {OPT: OPT + "    critic = DDP(nn.Linear(1, 1)); other = torch.optim.SGD("
                       "critic.parameters(), 0.001)\n", STEP: STEP + "            other.zero_grad();"
                       " critic(model(x)).mean().backward(); other.step()\n"},
    "by hand": {WRAP: "", "model.module.state": "model.state", BACK: BACK + (
        "            for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= 2\n")},
    "ZeRO": {"torch.optim.SGD(model.parameters(),": "__import__('torch.distributed.optim').distributed"
             ".optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD,"},
    "accumulation": {ZERO: "            n = optimizer.__dict__.setdefault('n', []); n.append(0)\n",
                     LOSS: LOSS.replace("loss = ", "model.require_backward_grad_sync = len(optimizer"
                                        ".__dict__.get('n', [])) % 4 == 3; loss = "),
                     STEP: "            if len(n) % 4 == 0: optimizer.step(); optimizer.zero_grad()\n"},
    "LBFGS": {OPT: "    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)\n", ZERO: (
        "            def closure():\n                optimizer.zero_grad(); loss = nn.functional"
        ".mse_loss(model(x), y); loss.backward(); return loss\n"), BACK: "",
        STEP: "            optimizer.step(closure)\n"},
}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    import check_training
    return check_training


def record(folder, broken=False):
    """Called in each rank before the script: the recorder comes in."""
    sys.path.insert(0, str(ROOT / "launch"))
    import check_training_recorder as recorder
    recorder.FOLDER = folder
    recorder.install()
    recorder.begin_anew()
    if broken:
        recorder.Me.enter_forward = lambda *_: 1 / 0


def watched(tmp_path, changes, broken=False, **options):
    """Run a variant of the script with the recorder. Return (the folder of records, result)."""
    script, folder = variant(tmp_path, BASE, changes), tmp_path / "records"
    folder.mkdir()
    return folder, fork_ranks(script, cwd=tmp_path, before=functools.partial(
        record, str(folder), broken), **options)


def said(module, folder, without=None):
    """What is said of the records, as the command prints it. (without="times": not of the time.)"""
    rules = [rule for rule in module.RULES if rule.__name__ != without]
    runs, alone, failures = module.read(str(folder))
    found = module.judge(runs, alone, rules=rules)
    if without != "times":
        list(module.times(runs[-1]))
    found = [*found, *(each for each in runs[-1].said if each not in found)]
    return "\n".join(f"{'found' if level == 'found' else 'question'}: {what}\n  {cost}"
                     for level, what, cost, _ in found), failures


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if plain else LONG)
                                  for name, (*_, plain) in MISTAKES.items()])
def test_a_mistake_is_named(module, tmp_path, name):
    """With the line of the script; and by its rule alone."""
    changes, rule, pattern, named, _ = MISTAKES[name]
    folder, result = watched(tmp_path, changes)
    assert result.status == 0, result.output
    text, failures = said(module, folder)
    assert re.search(pattern, text) and not failures, (text, failures)
    if named:
        lines = (tmp_path / "many_processes.py").read_text().splitlines()
        whole = text[re.search(pattern, text).start() :].partition("\n")[0]
        numbers = map(int, re.findall(r"many_processes\.py:(\d+)", whole))
        assert any(named.strip() in lines[n - 1] for n in numbers), (whole, named)
    assert not re.search(pattern, said(module, folder, without=rule)[0])  # no other rule says it


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ("as it is", "two optimizers")
                                               else LONG) for name in RIGHT])
def test_a_right_script_is_not_accused(module, tmp_path, name):
    folder, result = watched(tmp_path, RIGHT[name])
    assert result.status == 0, result.output
    assert said(module, folder, without="times") == ("", [])


def test_the_bits_stay_and_a_recorder_that_fails_steps_aside(module, tmp_path):
    """The same losses and weights without a recorder, with it, and with one that fails."""
    outputs = []
    for how in "without", "with", "broken":
        (folder := tmp_path / how).mkdir()
        if how == "without":
            result = fork_ranks(BASE, cwd=folder)
        else:
            records, result = watched(folder, {}, broken=how == "broken")
            assert len(module.read(str(records))[2]) == 2 * (how == "broken")
        outputs.append((result.status, result.output, hashlib.sha256(b"".join(
            t.numpy().tobytes() for t in torch.load(folder / "model.pt").values())).hexdigest()))
    assert outputs[0][0] == 0 and outputs[0] == outputs[1] == outputs[2]


class Elsewhere:
    """Stands for a tensor of a GPU: nothing of it may be read."""

    layout, is_quantized, is_cuda = torch.strided, False, False
    device = torch.device("xpu")


def test_no_gpu_is_waited_for_after_the_first_steps(module, monkeypatch):
    import check_training_recorder as recorder
    monkeypatch.setattr(recorder, "torch", torch)
    monkeypatch.setattr(recorder.torch, "Tensor", Elsewhere)
    assert recorder.readable(Elsewhere(), 0)
    assert not any(recorder.readable(Elsewhere(), i) for i in (recorder.FIRST, 100, 10**9))


@pytest.mark.parametrize(("options", "error"), [
    ([], "the command is missing"), (["--seconds", "0", "--", "true"], "--seconds and --stall must"),
    (["--json", "no/such/file", "--", "true"], "cannot write no/such/file"),
    (["--", "no_such_command"], "cannot start the command"),
])  # fmt: skip
def test_wrong_calls(tmp_path, options, error):
    result = run(PYTHON, CHECK, *options, cwd=tmp_path, env=ACTIVE)
    assert result.status == 2 and result.error().startswith(error), result.output


TWO = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]


@LONG
def test_the_command_with_a_slow_rank(tmp_path):
    """Through a shell, with another sitecustomize in the way; the picture has a row for each rank."""
    variant(tmp_path, BASE, MISTAKES["slow rank"][0])
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("print('mine, too')\n")
    (tmp_path / "job.sh").write_text(f"{' '.join(map(str, TWO))} many_processes.py\n")
    result = run(PYTHON, CHECK, "--picture", "steps.svg", "--json", "found.json", "--", "sh", "job.sh",
                 cwd=tmp_path, env={**ACTIVE, "PYTHONPATH": str(tmp_path / "site")})
    assert result.status == 1, result.output
    assert "epoch 4: loss 0.0177" in result.output and "mine, too" in result.output
    assert "\nfound: rank 0 waits for rank 1 in " in result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["read"] for each in found["said"] if each["level"] == "found"] == [
        "pitfalls/slow_rank.py"] and found["status"] == 0
    picture = xml.etree.ElementTree.parse(tmp_path / "steps.svg").getroot()
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "ms", "forward"} <= {*texts}


@LONG
@pytest.mark.parametrize(("command", "changes", "status", "text"), [
    (TWO, {}, 0, r"\nnothing found\nlooked at: 2 ranks, 1 starts, 80 steps"),
    ([PYTHON, "-I"], None, 1, "no process of the command was seen to train: python -I"),
    (TWO, before(RANK_0, "if dist.get_rank() == 0: dist.all_gather_object([None] * 2, 1)"), 1,
     r"found: it stands still for 4 s: rank 0 in all_gather_object at many_processes.py:49; rank 1 "),
    (TWO, after(LOSS, "raise ValueError('no loss')"), 1, "(?s)fails, with status 1.*no loss"),
])  # fmt: skip
def test_the_command(tmp_path, command, changes, status, text):
    variant(tmp_path, BASE, changes or {})
    script = ["-c", "print(1)"] if changes is None else ["many_processes.py"]
    result = run(PYTHON, CHECK, "--stall", 4, "--", *command, *script, cwd=tmp_path, env=ACTIVE)
    assert result.status == status and re.search(text, result.output), result.output


@LONG
def test_ctrl_c_ends_all_processes(tmp_path):
    variant(tmp_path, BASE, {"range(5)": "range(10**9)"})
    process = start(PYTHON, CHECK, "--", *TWO, "many_processes.py", cwd=tmp_path, env={
        **ACTIVE, "TMPDIR": str(tmp_path)})
    try:
        read_until(process, "epoch 3")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert not [name for name in os.listdir(tmp_path) if name.startswith("check")]
    finally:
        end(process)
