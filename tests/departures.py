"""Machines leave, die and come back in random order; whatever was saved must be there.

    python tests/departures.py --rounds 20

Each round is a job of 03_multinode.py on three machines of launch/lab, with one file system for all
or with a disk each; any of them hosts the rendezvous. A machine is told to end (SIGTERM), killed,
loses its worker, is cut off for a while, or comes back. When the host of the rendezvous goes, the
others end, and some of them start again. What rank 0 prints is then held against what each machine
must have on its disk:
- an attempt begins with the newest position (epoch, images) that any of its machines has;
- epochs follow each other, none twice and none left out, but for those since the last save;
- the job goes on after each event, and in the end all disks hold the same snapshot.
"""

import argparse
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

import torch
from lab import Lab
from support import ROOT, family, tensors, wait_until, write_digits

NODES = "node1", "node2", "node3"
EVENTS = "SIGTERM", "kill", "worker", "cut", "return"


class Round:
    """A job on machines that come and go."""

    def __init__(self, seed, lab, folder, script=ROOT / "03_multinode.py"):
        self.rng, self.lab, self.folder, self.script = random.Random(seed), lab, folder, script
        self.shared = self.rng.random() < 0.3
        self.data = write_digits(folder / "data")
        self.running, self.jobs, self.starts, self.story = {}, [], 0, []
        for node in NODES:
            self.path(node).parent.mkdir(exist_ok=True)

    def path(self, node):
        return self.folder / ("shared" if self.shared else node) / "snapshot.pt"

    def start_all(self):
        """Start the job on some of the machines, one of which hosts the rendezvous."""
        self.starts += 1
        nodes = self.rng.sample(NODES, self.rng.choice((2, 3)) if self.starts == 1 else 2)
        self.host = self.rng.choice(nodes)
        self.story.append(f"start of {' '.join(sorted(nodes))} at {self.host}")
        for node in nodes:
            self.start(node)

    def start(self, node):
        self.running[node] = self.lab.start(
            node, "torchrun", "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=50",
            f"--rdzv-id={self.starts}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.host}:{29600 + self.starts}",
            "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5",
            self.script, 10_000, 3, "--batch-size", 24, "--timeout", 15,
            "--data-dir", self.data, "--snapshot-path", self.path(node))  # fmt: skip
        self.jobs.append(self.running[node])

    def go_on(self):
        """Wait until all machines that run have trained an epoch together, and some time more."""
        moment, line = time.monotonic(), rf"^\[rank 0/{len(self.running)}\] epoch"
        wait_until(lambda: any(
            when > moment and re.match(line, text)
            for job in self.jobs for when, text in list(job.lines)
        ), self.output, timeout=180)  # fmt: skip
        time.sleep(self.rng.uniform(0, 1.5))  # so that the next event comes at any moment

    def torchrun(self, node):
        """The process of torchrun on a machine."""
        return next(pid for pid, command in family(self.running[node].process, itself=True).items()
                    if "torchrun" in command and "--rdzv" in command)  # fmt: skip

    def worker(self, node):
        return next(pid for pid, command in family(self.running[node].process).items()
                    if "03_multinode.py" in command and "--rdzv" not in command)  # fmt: skip

    def event(self):
        """Something happens to a machine; afterwards, self.running are those that train."""
        away = [node for node in NODES if node not in self.running]
        kind = self.rng.choice([e for e in EVENTS if away or e != "return"])
        node = self.rng.choice(away if kind == "return" else sorted(self.running))
        if kind == "cut" and node == self.host:  # all could only wait until it is back
            kind = "worker"
        self.story.append(f"{kind} {node}{' (host)' * (node == self.host)}")
        if kind == "return":
            return self.start(node)
        if kind == "worker":
            return os.kill(self.worker(node), signal.SIGKILL)
        if kind == "cut":  # the others go on without it, and it comes back by itself
            self.lab("cut", node)
            job = self.running.pop(node)
            self.go_on()
            self.lab("mend", node)
            self.running[node] = job
            return None
        if kind == "kill":
            self.lab("kill", node)
        else:
            os.kill(self.torchrun(node), signal.SIGTERM)
        self.running.pop(node).result(90)
        if node == self.host or not self.running:  # the others end, too
            for job in self.running.values():
                job.result(180)
            self.running.clear()
            self.start_all()

    def play(self, events):
        self.start_all()
        self.go_on()
        for _ in range(events):
            self.event()
            self.go_on()
        for node in self.running:
            os.kill(self.torchrun(node), signal.SIGTERM)
        for job in self.running.values():
            job.result(90)
        self.check()

    def output(self):
        return "\n".join([str(self.story), *(line for _, line in self.lines())])

    def lines(self):
        return sorted(item for job in self.jobs for item in job.lines)

    def check(self):
        """Raise AssertionError if something is lost, or if the disks differ in the end."""
        check([line for _, line in self.lines()], self.shared)
        snapshots = [torch.load(self.path(node), weights_only=True) for node in self.running]
        for other in snapshots[1:]:
            assert other["written_by"] == snapshots[0]["written_by"]
            assert all(torch.equal(*pair) for pair in
                       zip(tensors(snapshots[0]), tensors(other), strict=True))  # fmt: skip


def check(lines, shared):
    """Raise AssertionError if what 03 printed tells of a loss; return how often it was resumed.

    shared: whether all machines have the same disk.
    """
    on_disk, members, resumed, next_epoch, position = {}, [], 0, None, None
    for line in lines:
        if not (m := re.match(r"\[rank 0/\d\] (.*)", line)):
            continue
        line = m[1]
        if line.startswith("machine "):
            members, position, next_epoch = [], (1, 0), 1
        elif m := re.match(r"(node\d) .* cpu ", line):
            members.append("all" if shared else m[1])
        elif line.startswith("data: "):
            newest = max(on_disk.get(node, (1, 0)) for node in members)
        elif m := re.match(r"resumed from .* at epoch (\d+)(?:, image (\d+))?$", line):
            position, resumed = (int(m[1]), int(m[2] or 0)), resumed + 1
            next_epoch = position[0]
        elif m := re.match(r"(?:leaving \(SIGTERM\): )?epoch +(\d+)", line):
            if position is not None:  # the first report of an attempt
                assert position >= newest, f"{newest} was saved, not {position}"
                on_disk |= dict.fromkeys(members, position)
                position = None
            assert int(m[1]) == next_epoch, f"{line}: not epoch {next_epoch}"
            images = re.search(r"after (\d+) images", line)
            if "saved in" in line:
                saved = (next_epoch, int(images[1])) if images else (next_epoch + 1, 0)
                on_disk |= dict.fromkeys(members, saved)
            next_epoch += 1
    return resumed


def play(seed, events=4, script=ROOT / "03_multinode.py"):
    """Play the round of this seed; return its story."""
    with tempfile.TemporaryDirectory() as folder, Lab(folder, 3) as lab:
        a_round = Round(seed, lab, pathlib.Path(folder), script)
        try:
            a_round.play(events)
        except AssertionError as error:
            raise AssertionError(f"{a_round.output()}\n{error}") from None
        disks = "one disk" if a_round.shared else "own disks"
        return f"{disks}: {', '.join(a_round.story)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the first")
    parser.add_argument("--script", type=pathlib.Path, default=ROOT / "03_multinode.py")
    args = parser.parse_args()
    failed = 0
    for seed in range(args.seed, args.seed + args.rounds):
        begin = time.monotonic()
        try:
            said = play(seed, script=args.script.resolve())
        except AssertionError as error:
            said, failed = f"FAILED\n{error}", failed + 1
        print(f"--seed {seed} {time.monotonic() - begin:4.0f} s  {said}", flush=True)
    print(f"{args.rounds} rounds, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
