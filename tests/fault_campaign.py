"""Kill a training job anywhere, many times, and look whether anything is lost.

    python tests/fault_campaign.py --rounds 100

A round has a script (02, 03, or "steps": recipes/train_by_steps.py), a number of ranks, a victim (a
rank, the launcher torchrun, or the whole job), a moment and a signal. First come the rounds of
DESIGN, in which each of them occurs, then so many that are drawn at random; the seed of the draw is
printed. With --script, all rounds are of that one. The job runs under torchrun with
--max-restarts=3, and is started again if torchrun itself gives up or was killed. Then:
- the snapshot loads, and its epoch (or step) is not older than the last one announced as saved;
- no other file is left, and no process;
- the final weights, and the optimizer's state, are those of an uninterrupted run, bit for bit.

The scripts know nothing of this. torchrun starts this file instead, which changes a function that
the script calls, so that the signal is sent at exactly that moment, and then runs the script.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import pathlib
import random
import re
import runpy
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


@dataclass
class Script:
    """A script that is struck, and what it calls things."""

    path: str
    unit: str  # what it counts: "epoch" or "step"
    total: int  # so many of them in a round
    save_every: tuple  # drawn from these
    evaluates_when_saving: bool  # otherwise in each epoch
    optimizer_steps: int  # in one of the units
    resume: str  # the function in which every rank goes on from the snapshot
    net: str  # the class of its model
    tensors: int  # in a snapshot: the parameters, and what the optimizer has for each

    def counts(self, save_every):
        """{moment: how often it comes in an uninterrupted run}, where that is not once."""
        saves = self.total // save_every
        counts = dict.fromkeys(SAVING, saves)
        counts["step"] = self.total * self.optimizer_steps
        counts["evaluation"] = saves if self.evaluates_when_saving else self.total
        return counts

    def arguments(self, save_every, data_dir):
        """The command line of a round."""
        # 13 windows: neither 2 nor 3 ranks, nor their two micro-batches, divide them.
        batch = ("--batch-size", 13) if self.unit == "step" else ("--data-dir", data_dir)
        return self.total, save_every, "--snapshot-path", "snapshot.pt", *batch


SCRIPTS = {
    "02": Script("02_torchrun_elastic.py", "epoch", 4, (1, 2), False, 16, "resume", "Net", 12),
    "03": Script("03_multinode.py", "epoch", 4, (1, 2), False, 16, "resume", "Net", 12),
    "steps": Script("recipes/train_by_steps.py", "step", 24, (4, 8), True, 1, "load_snapshot",
                    "GPT", 112),
}  # fmt: skip
SAVING = ("writing", "before the move", "after the move")  # rank 0 alone saves
# Who is struck, when, and how. In the first moments torchrun itself is starting.
MOMENTS = (
    "torchrun starts", "rank starts", "resuming", "step", "evaluation", *SAVING, "the end",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")


@dataclass
class Plan:
    """One round: what is struck, and when."""

    script: str
    world_size: int
    save_every: int
    victim: str  # "rank 1", "launcher", "job"
    actor: int  # the rank that sends the signal when it comes to the moment
    moment: str
    count: int  # at which time it comes there, from 1
    signal: str
    seconds: float  # for "torchrun starts", which has no ranks yet: after how long

    def __str__(self):
        return (f"{self.script:<5}  {self.world_size} ranks  {self.signal:<7}  {self.victim:<8}"
                f"  {self.moment}")  # fmt: skip

    @classmethod
    def make(cls, moment, signal, victim, script, world_size, count=1, save_every=1):
        """A round of the design; count: at which time at the moment."""
        actor = int(victim[-1]) if victim.startswith("rank") else world_size - 1
        actor = 0 if moment in SAVING else actor
        return cls(script, world_size, save_every, victim, actor, moment, count, signal, 1.0)

    @classmethod
    def draw(cls, seed, scripts=("02", "02", "03", "steps", "steps")):
        """The plan of a seed, for one of the scripts."""
        rng = random.Random(seed)
        script = rng.choice(scripts)
        world_size, moment = rng.choice((2, 3)), rng.choice(MOMENTS)
        victims = ["launcher", "job", *(f"rank {rank}" for rank in range(world_size))]
        victim = rng.choice(victims[:2] if moment == "torchrun starts" else victims)
        actor = int(victim[-1]) if victim.startswith("rank") else rng.randrange(world_size)
        actor = 0 if moment in SAVING else actor
        save_every = rng.choice(SCRIPTS[script].save_every)
        count = rng.randint(1, SCRIPTS[script].counts(save_every).get(moment, 1))
        return cls(script, world_size, save_every, victim, actor, moment, count,
                   rng.choice(SIGNALS), rng.uniform(0, 2.5))  # fmt: skip


# Every moment, every signal with every kind of victim, all scripts, both numbers of ranks.
DESIGN = [Plan.make(*row) for row in (
    ("torchrun starts", "SIGKILL", "launcher", "02", 2),
    ("torchrun starts", "SIGINT", "job", "03", 2),
    ("rank starts", "SIGTERM", "job", "02", 2),
    ("resuming", "SIGKILL", "rank 1", "03", 2),
    ("resuming", "SIGINT", "launcher", "02", 2),
    ("step", "SIGKILL", "rank 0", "02", 3, 40),
    ("step", "SIGTERM", "launcher", "03", 2, 21),
    ("evaluation", "SIGINT", "job", "02", 3, 2),
    ("evaluation", "SIGKILL", "rank 1", "03", 3, 3, 2),
    ("writing", "SIGKILL", "job", "02", 2, 2),
    ("writing", "SIGTERM", "rank 0", "03", 2, 3),
    ("before the move", "SIGINT", "rank 0", "03", 2, 2),
    ("after the move", "SIGKILL", "launcher", "02", 3, 1, 2),
    ("the end", "SIGTERM", "rank 1", "02", 2),
    ("the end", "SIGINT", "launcher", "03", 3),
    ("resuming", "SIGKILL", "job", "steps", 2, 1, 4),
    ("step", "SIGKILL", "rank 2", "steps", 3, 11, 4),
    ("step", "SIGTERM", "launcher", "steps", 3, 17, 8),
    ("evaluation", "SIGTERM", "rank 1", "steps", 2, 2, 8),
    ("writing", "SIGKILL", "rank 0", "steps", 3, 2, 4),
    ("before the move", "SIGKILL", "launcher", "steps", 2, 3, 4),
    ("after the move", "SIGINT", "job", "steps", 3, 1, 8),
    ("the end", "SIGKILL", "rank 1", "steps", 2, 1, 4),
)]  # fmt: skip


# ---- In each worker: torchrun runs this file, and this file runs the script ----


def strike(plan, folder):
    """Send the signal to the victim, once in a round; called by one of its ranks."""
    try:
        os.close(os.open(folder / "struck", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return  # the moment has come again, in a later attempt
    pids, deadline = {}, time.monotonic() + 60
    while len(pids) < plan.world_size:  # torchrun has started them all by now
        for rank in range(plan.world_size):
            with contextlib.suppress(OSError, ValueError):
                pids[f"rank {rank}"] = int((folder / f"pid{rank}").read_text())
        if time.monotonic() > deadline:
            raise RuntimeError(f"fault_campaign.py: of the ranks, only {sorted(pids)} have come")
        time.sleep(0.01)
    own = pids.pop(f"rank {os.environ['RANK']}")
    order = {"launcher": [os.getppid()], "job": [os.getppid(), *pids.values(), own]}
    for pid in order.get(plan.victim) or [{**pids, f"rank {os.environ['RANK']}": own}[plan.victim]]:
        with contextlib.suppress(ProcessLookupError):  # torchrun may have been faster
            os.kill(pid, signal.Signals[plan.signal])


def run_worker(plan, folder, script, arguments):
    """Run the script with the function of the plan's moment changed, if this rank is the actor."""
    (folder / f"pid{os.environ['RANK']}.new").write_text(str(os.getpid()))
    os.replace(folder / f"pid{os.environ['RANK']}.new", folder / f"pid{os.environ['RANK']}")
    sys.argv = [script, *arguments]
    names = runpy.run_path(script)["log"].__globals__
    if "REPORT_EVERY" in names:
        names["REPORT_EVERY"] = 1  # so that repeated() can count
    if int(os.environ["RANK"]) == plan.actor:
        change(plan, folder, names)
    names["main"]()


def change(plan, folder, names):
    """Have the signal sent at the plan's moment; names are the script's own globals.

    This relies on the scripts' functions log, pick_device and check_replicas, on the names in
    SCRIPTS, and on what they call of Python and torch: os.replace and torch.save(state, file) in
    rank 0's save, a torch optimizer, and no gradients in the evaluation alone, with one forward
    pass on each rank. A function that is missing ends the worker with a KeyError; a call that is
    never made, the round: "the moment never came".
    """
    calls = Counter()

    def count_up(*_):
        """The moment has come once more."""
        calls[plan.moment] += 1
        if calls[plan.moment] == plan.count:
            strike(plan, folder)

    def before(function, condition=lambda: True):
        def call(*args, **kwargs):
            if condition():
                count_up()
            return function(*args, **kwargs)

        return call

    def write_in_halves(state, file):
        whole = io.BytesIO()
        original_save(state, whole)
        content = whole.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        count_up()
        file.write(content[len(content) // 2 :])

    def replace_first(source, target):
        original_replace(source, target)
        count_up()

    original_save, original_replace = torch.save, os.replace
    script = SCRIPTS[plan.script]
    if name := {"rank starts": "pick_device", "resuming": script.resume,
                "the end": "check_replicas"}.get(plan.moment):  # fmt: skip
        names[name] = before(names[name])
    elif plan.moment == "step":  # (the pass after wrapping the model makes none)
        register_optimizer_step_pre_hook(count_up)
    elif plan.moment == "evaluation":
        net = names[script.net]
        net.forward = before(net.forward, lambda: not torch.is_grad_enabled())
    elif plan.moment == "writing":
        torch.save = write_in_halves
    elif plan.moment == "before the move":
        os.replace = before(os.replace)
    elif plan.moment == "after the move":
        os.replace = replace_first
    elif plan.moment != "torchrun starts":  # that one, play() sees to
        raise ValueError(f"no such moment: {plan.moment}")


# ---- The campaign ----


def command(plan, folder, data_dir):
    """What starts the job of a plan."""
    from support import ROOT, TORCHRUN

    launcher = (*TORCHRUN, "--standalone", f"--nproc-per-node={plan.world_size}")
    script = SCRIPTS[plan.script]
    worker = (__file__, "--worker", json.dumps(asdict(plan)), folder, ROOT / script.path)
    return *launcher, "--max-restarts=3", *worker, *script.arguments(plan.save_every, data_dir)


def play(plan, folder, data_dir, whole):
    """Play one round in folder; return (starts, what was printed). Raises AssertionError."""
    from support import assert_nothing_left, end, family, start, tensors

    output = ""
    for starts in range(1, 5):
        # 03 asks for this variable (launch/README.md): it cannot tell attempts apart by itself.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if plan.script == "03" else {}
        job = start(*command(plan, folder, data_dir), cwd=folder, env=env)
        try:
            if starts == 1 and plan.moment == "torchrun starts":
                time.sleep(plan.seconds)
                victims = [job.pid, *(family(job) if plan.victim == "job" else [])]
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.Signals[plan.signal])
            output += job.communicate(timeout=300)[0]
            assert_nothing_left(job)
        finally:
            end(job)
        check_snapshot(folder / "snapshot.pt", output)
        if job.returncode == 0:
            break
    assert job.returncode == 0, f"not done after {starts} starts:\n{output}"
    struck = plan.moment == "torchrun starts" or (folder / "struck").exists()
    assert struck, f"the moment never came:\n{output}"
    ours = r"struck|pid\d|.*\.lock$|.*\.[0-9a-f]{32}\.tmp$"  # the last: 03's first_on_its_disk
    left = {path.name for path in folder.iterdir() if not re.match(ours, path.name)}
    assert left == {"snapshot.pt"}, left
    found = torch.load(folder / "snapshot.pt", weights_only=True)
    pairs = list(zip(tensors(found), tensors(whole), strict=True))
    assert len(pairs) == SCRIPTS[plan.script].tensors
    assert all(torch.equal(*pair) for pair in pairs), f"other weights:\n{output}"
    assert rates(found) == rates(whole), output
    return starts, output


def check_snapshot(path, output):
    """Raise AssertionError unless the snapshot is whole and holds what was announced as saved."""
    announced = [int(n) for n in re.findall(r"(?:epoch|step) +(\d+)/.*\| saved in", output)]
    if announced or path.exists():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        snapshot = torch.load(path, weights_only=True)
        done = snapshot["step"] if "step" in snapshot else snapshot["next_epoch"] - 1
        assert done >= max(announced, default=0), output


def rates(snapshot):
    """What a snapshot holds apart from tensors: the learning rate and where its schedule is."""
    return snapshot["optimizer"]["param_groups"], snapshot.get("scheduler")


def repeated(output):
    """How many epochs or steps rank 0 has reported twice: the work that the strike has cost."""
    pattern = r"^\[rank 0/\d\] (?:epoch|step) +(\d+)/\d+ \| loss"
    reported = Counter(re.findall(pattern, output, re.MULTILINE))
    assert reported, output
    return sum(count - 1 for count in reported.values())


@functools.cache
def whole_run(script, world_size, data_dir):
    """The last snapshot of an uninterrupted run."""
    from support import fork_ranks

    with tempfile.TemporaryDirectory() as folder:
        path, total = SCRIPTS[script].path, SCRIPTS[script].total
        arguments = SCRIPTS[script].arguments(total, data_dir)
        result = fork_ranks(path, *arguments, cwd=folder, world_size=world_size)
        assert result.status == 0, result.output
        return torch.load(f"{folder}/snapshot.pt", weights_only=True)


def one_round(plan, data_dir):
    """Play a round in a folder of its own; return (starts, epochs or steps repeated)."""
    whole = whole_run(plan.script, plan.world_size, data_dir)
    # A shell starts what it runs in the background with SIGINT ignored, and torchrun inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        starts, output = play(plan, pathlib.Path(folder), data_dir, whole)
    again = repeated(output)
    assert again <= plan.save_every, output
    return starts, again


def campaign(plans, data_dir):
    """Play the rounds, printing a line for each; return [(plan, starts, repeated)]."""
    if not plans:
        raise ValueError("a campaign of no rounds shows nothing")
    played = []
    for number, plan in enumerate(plans):
        begin = time.monotonic()
        starts, again = one_round(plan, data_dir)
        played.append((plan, starts, again))
        unit = SCRIPTS[plan.script].unit
        print(f"{number:>3}  {plan!s:<59}  {starts} starts, {again} {unit}s repeated,"
              f" {time.monotonic() - begin:4.0f} s", flush=True)  # fmt: skip
    return played


def report(played):
    """Print how many rounds struck whom, when and how."""
    for name in ("script", "world_size", "signal", "victim", "moment"):
        counts = sorted(Counter(str(getattr(plan, name)) for plan, _, _ in played).items())
        print(f"{name:<10}  {', '.join(f'{value}: {count}' for value, count in counts)}")
    by_hand, costs = sum(starts > 1 for _, starts, _ in played), Counter()
    for plan, _, again in played:
        costs[SCRIPTS[plan.script].unit] += again
    print(f"{len(played)} rounds: {by_hand} started again by hand, the others by torchrun;"
          f" {', '.join(f'{unit}s repeated {cost}' for unit, cost in sorted(costs.items()))};"
          " lost: none")  # fmt: skip


def main():
    if sys.argv[1:2] == ["--worker"]:
        plan, folder, script, *arguments = sys.argv[2:]
        return run_worker(Plan(**json.loads(plan)), pathlib.Path(folder), script, arguments)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="at random, after those of DESIGN")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="drawn if not given")
    parser.add_argument("--script", choices=SCRIPTS, help="all rounds of this one")
    args = parser.parse_args()
    if args.rounds < 1:
        print("fault_campaign.py: error: --rounds: give 1 or more", file=sys.stderr)
        sys.exit(2)
    from support import write_digits

    design = [plan for plan in DESIGN if args.script in (None, plan.script)]
    print(f"{len(design)} rounds of the design, then {args.rounds} drawn with --seed {args.seed}")
    scripts = {"scripts": (args.script,)} if args.script else {}
    drawn = [Plan.draw(f"{args.seed}/{number}", **scripts) for number in range(args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        report(campaign([*design, *drawn], write_digits(pathlib.Path(folder))))


if __name__ == "__main__":
    main()
