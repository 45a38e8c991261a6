"""Kill a training job anywhere, many times, and look whether anything is lost.

    python tests/fault_campaign.py --rounds 100

A round has a script (02, 03, or template/train.py), a number of ranks, a victim (a rank, the
launcher torchrun, or the whole job), a moment and a signal. A lesson, 02 or 03, does not end when
torchrun alone is killed by SIGKILL, so there is no such round. First come the rounds of DESIGN, in
which each of them occurs, then so many that are drawn at random; the seed of the draw is printed.
The job runs under torchrun with --max-restarts=3, and is started again if torchrun itself gives up
or was killed. Then:
- the snapshot loads, and its epoch (or step) is not older than the last one announced as saved;
- no other file is left, and no process;
- the final weights, and the optimizer's state, are those of an uninterrupted run, bit for bit, and
  so is the template's log, with no row twice.

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
from dataclasses import asdict, dataclass

import torch
from digits import tensors, write_digits
from forked import fork_ranks
from started import ROOT, TORCHRUN, assert_nothing_left, end, family, start, wait_until

SCRIPTS = {
    "02": "02_torchrun_elastic.py",
    "03": "03_multinode.py",
    "template": "template/train.py",
}
# Epochs, or steps; and after how many a snapshot is saved.
LENGTHS = {"02": (4, 2), "03": (4, 2), "template": (24, 8)}


def arguments(script, save_every, data_dir):
    """The command line of a round."""
    # 13 windows: neither 2 nor 3 ranks, nor their two micro-batches, divide them.
    data = ("--batch-size", 13) if script == "template" else ("--data-dir", data_dir)
    return LENGTHS[script][0], save_every, "--snapshot-path", "snapshot.pt", *data


SAVING = ("writing", "before the move", "after the move")  # rank 0 alone saves
# Who is struck, when, and how. In the first moment the ranks import torch, and torchrun waits.
LESSONS = ("02", "03")
MOMENTS = ("import", "rank starts", "resuming", "step", "evaluation", *SAVING, "the end")
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

    @property
    def actor(self):
        """The rank that sends the signal when it comes to the moment."""
        if self.moment in SAVING:
            return 0
        return int(self.victim[-1]) if self.victim.startswith("rank") else self.world_size - 1

    def __str__(self):
        return (f"{self.script:<8}  {self.world_size} ranks  {self.signal:<7}  {self.victim:<8}"
                f"  {self.moment}")  # fmt: skip

    @classmethod
    def draw(cls, seed):
        """The plan of a seed."""
        rng = random.Random(seed)
        script = rng.choice(("02", "03", "template", "template", "template"))
        world_size, moment = rng.choice((2, 3)), rng.choice(MOMENTS)
        victims = ["launcher", "job", *(f"rank {rank}" for rank in range(world_size))]
        victim = rng.choice(victims[:2] if moment == "import" else victims)
        signals = SIGNALS
        if victim == "launcher" and script in LESSONS:
            signals = [name for name in SIGNALS if name != "SIGKILL"]
        length, save_every = LENGTHS[script]
        saves = length // save_every
        times = {"step": 16 * length, "evaluation": length}
        if script == "template":
            times = {"step": length, "evaluation": saves}
        count = rng.randint(1, (times | dict.fromkeys(SAVING, saves)).get(moment, 1))
        return cls(moment, rng.choice(signals), victim, script, world_size, count)


# Every moment, every signal with every kind of victim, all scripts, both numbers of ranks.
DESIGN = [Plan(*row) for row in (
    ("import", "SIGTERM", "launcher", "02", 2),
    ("import", "SIGKILL", "launcher", "template", 2),
    ("resuming", "SIGINT", "launcher", "02", 2),
    ("evaluation", "SIGINT", "job", "02", 2, 2),
    ("writing", "SIGKILL", "job", "02", 2, 2),
    ("step", "SIGKILL", "rank 1", "02", 3, 40),
    ("after the move", "SIGKILL", "rank 0", "02", 3),
    ("resuming", "SIGKILL", "rank 1", "03", 2),
    ("step", "SIGTERM", "rank 0", "03", 3, 50),
    ("rank starts", "SIGTERM", "job", "template", 2),
    ("resuming", "SIGKILL", "rank 1", "template", 3),
    ("step", "SIGKILL", "rank 0", "template", 3, 20),
    ("step", "SIGTERM", "launcher", "template", 3, 17),
    ("evaluation", "SIGTERM", "rank 1", "template", 2, 2),
    ("writing", "SIGKILL", "rank 0", "template", 2, 2),
    ("before the move", "SIGINT", "rank 0", "template", 2, 2),
    ("after the move", "SIGKILL", "launcher", "template", 3),
    ("after the move", "SIGINT", "job", "template", 2),
    ("the end", "SIGKILL", "rank 1", "template", 2),
)]  # fmt: skip


def play(plan, data_dir):
    """Play a round; return (starts, epochs or steps repeated)."""
    whole, log = whole_run(plan.script, plan.world_size, data_dir)
    # A shell starts what it runs in the background with SIGINT ignored, and torchrun inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "snapshot.pt")
        starts, output = run_until_done(plan, path, data_dir)
        assert path.with_name("struck").exists(), f"the moment never came:\n{output}"
        ours = r"struck|rank \d|.*\.lock$|.*\.tmp$"
        left = {name for name in os.listdir(folder) if not re.match(ours, name)}
        assert left <= {"snapshot.pt", "snapshot_best.pt", "snapshot.csv"}, left
        found = torch.load(path, weights_only=True)
        assert log_of(folder) == log, output
    assert len(tensors(found)) >= 12  # of 02 and 03: six parameters, each with its momentum
    assert all(torch.equal(*pair) for pair in zip(tensors(found), tensors(whole), strict=True)), (
        f"other weights:\n{output}")
    for name in ("scheduler", "best", "rows", "losses"):
        assert found.get(name) == whole.get(name), output
    assert found["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"], output
    reported = re.findall(r"^\[rank 0/\d\] (?:epoch|step) +(\d+)/\d+ \| loss", output, re.MULTILINE)
    again = len(reported) - len({*reported})  # the work that the strike has cost
    assert reported and again <= LENGTHS[plan.script][1], output
    return starts, again


def run_until_done(plan, path, data_dir):
    """Start the job, strike, and start it again until it is done; return (starts, output)."""
    orders, output = json.dumps(asdict(plan) | {"actor": plan.actor}), ""
    command = (*TORCHRUN, "--standalone", f"--nproc-per-node={plan.world_size}", "--max-restarts=3",
               ROOT / "tests/fault_worker.py", orders, path.parent, ROOT / SCRIPTS[plan.script],
               *arguments(plan.script, LENGTHS[plan.script][1], data_dir))
    # 03 asks for the variable (launch/README.md): it cannot tell attempts apart by itself.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if plan.script == "03" else {}
    for starts in range(1, 5):
        job = start(*command, cwd=path.parent, env=env)
        try:
            if starts == 1 and plan.moment == "import":
                strike_at_import(plan, job)
                path.with_name("struck").touch()
            output += job.communicate(timeout=300)[0]
            assert_nothing_left(job, patience=60)  # importing takes a while on a busy machine
        finally:
            end(job)
        check_snapshot(path, output)
        if job.returncode == 0:
            return starts, output
    raise AssertionError(f"not done after {starts} starts:\n{output}")


def strike_at_import(plan, job):
    def importing():
        """The ranks that have begun to import torch."""
        found = []
        for pid in family(job):
            with contextlib.suppress(OSError):  # it has just ended
                if "libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_text():
                    found.append(pid)
        return found if len(found) == plan.world_size else []

    ranks = wait_until(importing, "the ranks import torch")
    for pid in [job.pid, *(ranks if plan.victim == "job" else [])]:
        os.kill(pid, signal.Signals[plan.signal])


def check_snapshot(path, output):
    """Raise AssertionError unless the snapshot is whole and holds what was announced as saved."""
    announced = [int(n) for n in re.findall(r"(?:epoch|step) +(\d+)/.*\| saved in", output)]
    if announced or path.exists():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        snapshot = torch.load(path, weights_only=True)
        done = snapshot["step"] if "step" in snapshot else snapshot["next_epoch"] - 1
        assert done >= max(announced, default=0), output


@functools.cache
def whole_run(script, world_size, data_dir):
    """The last snapshot of an uninterrupted run, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        words = arguments(script, LENGTHS[script][1], data_dir)
        result = fork_ranks(SCRIPTS[script], *words, cwd=folder, world_size=world_size)
        assert result.status == 0, result.output
        return torch.load(f"{folder}/snapshot.pt", weights_only=True), log_of(folder)


def log_of(folder):
    path = pathlib.Path(folder, "snapshot.csv")
    return path.read_text() if path.exists() else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="at random, after those of DESIGN")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="drawn if not given")
    args = parser.parse_args()
    print(f"{len(DESIGN)} rounds of the design, then {args.rounds} drawn with --seed {args.seed}")
    plans = [*DESIGN, *(Plan.draw(f"{args.seed}/{number}") for number in range(args.rounds))]
    with tempfile.TemporaryDirectory() as folder:
        data_dir = write_digits(pathlib.Path(folder))
        for number, plan in enumerate(plans):
            begin = time.monotonic()
            starts, again = play(plan, data_dir)
            print(f"{number:>3}  {plan!s:<59}  {starts} starts, {again} repeated,"
                  f" {time.monotonic() - begin:4.0f} s", flush=True)
    print(f"{len(plans)} rounds, nothing lost")


if __name__ == "__main__":
    main()
