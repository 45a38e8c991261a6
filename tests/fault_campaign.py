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

fault_worker.py sends the signal, at exactly that moment.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import random
import re
import signal
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass

import torch
from support import (
    ROOT,
    TORCHRUN,
    assert_nothing_left,
    end,
    family,
    fork_ranks,
    start,
    tensors,
    write_digits,
)


@dataclass
class Script:
    """A script that is struck, and what it calls things."""

    path: str
    resume: str  # the function in which every rank goes on from the snapshot
    net: str  # the class of its model
    unit: str  # what it counts: "epoch" or "step"
    total: int  # so many of them in a round
    save_every: tuple  # drawn from these

    def arguments(self, save_every, data_dir):
        """The command line of a round."""
        # 13 windows: neither 2 nor 3 ranks, nor their two micro-batches, divide them.
        batch = ("--batch-size", 13) if self.unit == "step" else ("--data-dir", data_dir)
        return self.total, save_every, "--snapshot-path", "snapshot.pt", *batch


SCRIPTS = {
    "02": Script("02_torchrun_elastic.py", "resume", "Net", "epoch", 4, (1, 2)),
    "03": Script("03_multinode.py", "resume", "Net", "epoch", 4, (1, 2)),
    "steps": Script("recipes/train_by_steps.py", "load_snapshot", "GPT", "step", 24, (4, 8)),
}
SAVING = ("writing", "before the move", "after the move")  # rank 0 alone saves
# Who is struck, when, and how. In the first moment there are no ranks yet.
MOMENTS = (
    "torchrun starts", "rank starts", "resuming", "step", "evaluation", *SAVING, "the end",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")


@dataclass
class Plan:
    """One round: what is struck, and when."""

    moment: str
    signal: str
    victim: str  # "rank 1", "launcher", "job"
    script: str
    world_size: int
    count: int = 1  # at which time the moment comes, from 1
    save_every: int = 1
    actor: int | None = None  # the rank that sends the signal when it comes to the moment
    seconds: float = 1.0  # for "torchrun starts": after how long

    def __post_init__(self):
        if self.moment in SAVING:
            self.actor = 0
        elif self.victim.startswith("rank"):
            self.actor = int(self.victim[-1])
        elif self.actor is None:
            self.actor = self.world_size - 1

    def __str__(self):
        return (f"{self.script:<5}  {self.world_size} ranks  {self.signal:<7}  {self.victim:<8}"
                f"  {self.moment}")  # fmt: skip

    @classmethod
    def draw(cls, seed, scripts=("02", "02", "03", "steps", "steps")):
        """The plan of a seed, for one of the scripts."""
        rng = random.Random(seed)
        script, world_size, moment = rng.choice(scripts), rng.choice((2, 3)), rng.choice(MOMENTS)
        victims = ["launcher", "job", *(f"rank {rank}" for rank in range(world_size))]
        victim = rng.choice(victims[:2] if moment == "torchrun starts" else victims)
        save_every, total = rng.choice(SCRIPTS[script].save_every), SCRIPTS[script].total
        times = dict.fromkeys(SAVING, total // save_every)
        if script == "steps":
            times |= {"step": total, "evaluation": total // save_every}
        else:
            times |= {"step": 16 * total, "evaluation": total}
        return cls(moment, rng.choice(SIGNALS), victim, script, world_size,
                   rng.randint(1, times.get(moment, 1)), save_every,
                   rng.randrange(world_size), rng.uniform(0, 2.5))  # fmt: skip


# Every moment, every signal with every kind of victim, all scripts, both numbers of ranks.
DESIGN = [Plan(*row) for row in (
    ("torchrun starts", "SIGKILL", "launcher", "02", 2),
    ("resuming", "SIGINT", "launcher", "02", 2),
    ("evaluation", "SIGINT", "job", "02", 2, 2),
    ("writing", "SIGKILL", "job", "02", 2, 2),
    ("after the move", "SIGKILL", "launcher", "02", 3, 1, 2),
    ("rank starts", "SIGTERM", "job", "03", 2),
    ("step", "SIGKILL", "rank 0", "03", 3, 40),
    ("before the move", "SIGINT", "rank 0", "03", 2, 2),
    ("the end", "SIGTERM", "rank 1", "03", 2),
    ("step", "SIGTERM", "launcher", "steps", 3, 17, 8),
    ("evaluation", "SIGTERM", "rank 1", "steps", 2, 2, 8),
    ("writing", "SIGKILL", "rank 0", "steps", 2, 2, 4),
    ("after the move", "SIGINT", "job", "steps", 2, 1, 8),
    ("the end", "SIGKILL", "rank 1", "steps", 2, 1, 4),
)]  # fmt: skip


def play(plan, data_dir):
    """Play a round; return (starts, epochs or steps repeated)."""
    whole = whole_run(plan.script, plan.world_size, data_dir)
    # A shell starts what it runs in the background with SIGINT ignored, and torchrun inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "snapshot.pt")
        starts, output = run_until_done(plan, path, data_dir)
        assert plan.moment == "torchrun starts" or path.with_name("struck").exists(), (
            f"the moment never came:\n{output}")
        ours = r"struck|rank \d|.*\.lock$|.*\.[0-9a-f]{32}\.tmp$"  # the last: first_on_its_disk
        left = {name for name in os.listdir(folder) if not re.match(ours, name)}
        assert left <= {"snapshot.pt", "snapshot_best.pt"}, left
        found = torch.load(path, weights_only=True)
    pairs = list(zip(tensors(found), tensors(whole), strict=True))
    assert len(pairs) >= 12  # of 02 and 03: six parameters, each with its momentum
    assert all(torch.equal(*pair) for pair in pairs), f"other weights:\n{output}"
    assert found.get("scheduler") == whole.get("scheduler"), output
    assert found["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"], output
    again = repeated(output)
    assert again <= plan.save_every, output
    return starts, again


def run_until_done(plan, path, data_dir):
    """Start the job, strike, and start it again until it is done; return (starts, output)."""
    script, output = SCRIPTS[plan.script], ""
    launcher = (*TORCHRUN, "--standalone", f"--nproc-per-node={plan.world_size}")
    orders = json.dumps(asdict(plan) | {"resume": script.resume, "net": script.net})
    worker = (ROOT / "tests/fault_worker.py", orders, path.parent, ROOT / script.path)
    command = *launcher, "--max-restarts=3", *worker, *script.arguments(plan.save_every, data_dir)
    # 03 asks for this variable (launch/README.md): it cannot tell attempts apart by itself.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if plan.script == "03" else {}
    for starts in range(1, 5):
        job = start(*command, cwd=path.parent, env=env)
        try:
            if starts == 1 and plan.moment == "torchrun starts":
                time.sleep(plan.seconds)
                for pid in [job.pid, *(family(job) if plan.victim == "job" else [])]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.Signals[plan.signal])
            output += job.communicate(timeout=300)[0]
            assert_nothing_left(job)
        finally:
            end(job)
        check_snapshot(path, output)
        if job.returncode == 0:
            return starts, output
    raise AssertionError(f"not done after {starts} starts:\n{output}")


def check_snapshot(path, output):
    """Raise AssertionError unless the snapshot is whole and holds what was announced as saved."""
    announced = [int(n) for n in re.findall(r"(?:epoch|step) +(\d+)/.*\| saved in", output)]
    if announced or path.exists():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        snapshot = torch.load(path, weights_only=True)
        done = snapshot["step"] if "step" in snapshot else snapshot["next_epoch"] - 1
        assert done >= max(announced, default=0), output


def repeated(output):
    """How many epochs or steps rank 0 has reported twice: the work that the strike has cost."""
    pattern = r"^\[rank 0/\d\] (?:epoch|step) +(\d+)/\d+ \| loss"
    reported = Counter(re.findall(pattern, output, re.MULTILINE))
    assert reported, output
    return sum(count - 1 for count in reported.values())


@functools.cache
def whole_run(script, world_size, data_dir):
    """The last snapshot of an uninterrupted run."""
    script = SCRIPTS[script]
    with tempfile.TemporaryDirectory() as folder:
        arguments = script.arguments(script.total, data_dir)
        result = fork_ranks(script.path, *arguments, cwd=folder, world_size=world_size)
        assert result.status == 0, result.output
        return torch.load(f"{folder}/snapshot.pt", weights_only=True)


def campaign(plans, data_dir):
    """Play the rounds, printing a line for each, and then how many struck whom, when and how."""
    by_hand, costs = 0, Counter()
    for number, plan in enumerate(plans):
        begin, unit = time.monotonic(), SCRIPTS[plan.script].unit
        starts, again = play(plan, data_dir)
        by_hand += starts > 1
        costs[unit] += again
        print(f"{number:>3}  {plan!s:<59}  {starts} starts, {again} {unit}s repeated,"
              f" {time.monotonic() - begin:4.0f} s", flush=True)  # fmt: skip
    for name in ("script", "world_size", "signal", "victim", "moment"):
        counts = sorted(Counter(str(getattr(plan, name)) for plan in plans).items())
        print(f"{name:<10}  {', '.join(f'{value}: {count}' for value, count in counts)}")
    print(f"{len(plans)} rounds: {by_hand} started again by hand, the others by torchrun;"
          f" {', '.join(f'{unit}s repeated {cost}' for unit, cost in sorted(costs.items()))};"
          " lost: none")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="at random, after those of DESIGN")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="drawn if not given")
    parser.add_argument("--script", choices=SCRIPTS, help="all rounds of this one")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: give 1 or more")
    plans = [plan for plan in DESIGN if args.script in (None, plan.script)]
    print(f"{len(plans)} rounds of the design, then {args.rounds} drawn with --seed {args.seed}")
    scripts = {"scripts": (args.script,)} if args.script else {}
    plans += [Plan.draw(f"{args.seed}/{number}", **scripts) for number in range(args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        campaign(plans, write_digits(pathlib.Path(folder)))


if __name__ == "__main__":
    main()
