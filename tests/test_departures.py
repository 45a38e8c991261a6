"""Machines leave, die and come back in random order; whatever was saved must be there.

Each round is a job of template/train.py or of 03 on three machines of launch/lab, with one file
system for all or with a disk each; any of them hosts the rendezvous. A machine is told to end
(SIGTERM), killed, loses its worker, is cut off for a while, or comes back. When the host of the
rendezvous goes, the others end, and some of them start again. What rank 0 prints is then held
against what each machine must have on its disk:
- an attempt begins with the newest step (or epoch) that any of its machines has;
- steps follow each other, none twice and none left out, but for those since the last save;
- the job goes on after each event, and in the end all disks hold the same snapshot, with each
  validation once. (03 does not save when it has to leave: there, one disk may have the next one.)
"""

import os
import pathlib
import random
import re
import signal
import tempfile
import time

import pytest
import shown
import torch
from digits import difference, write_digits
from forked import variant
from lab import Lab
from started import family, wait_until

pytestmark = pytest.mark.long
NODES = "node1", "node2", "node3"
TEMPLATE, LESSON = "template/train.py", "03_multinode.py"
SAVE_EVERY = {TEMPLATE: 20, LESSON: 3}
# What the others print. The first only if a heartbeat was due before their processes had failed.
LOST = ("has failed to send a keep-alive heartbeat to the rendezvous",
        "has failed to shutdown the rendezvous")  # fmt: skip


class Round:
    """A job on machines that come and go."""

    def __init__(self, seed, lab, folder, shared, script):
        self.rng, self.lab, self.folder = random.Random(seed), lab, folder
        self.script, self.save_every = script, SAVE_EVERY[script]
        self.path_of_script = variant(folder, script, "REPORT_EVERY = 1")
        self.shared = shared
        self.data = ["--data-dir", write_digits(folder / "data")] if script == LESSON else []
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
            self.path_of_script, 100_000, self.save_every, "--batch-size", 24, "--timeout", 15,
            *self.data, "--snapshot-path", self.path(node))  # fmt: skip
        self.jobs.append(self.running[node])

    def go_on(self):
        """Wait until all machines that run have trained a step together, and some time more."""
        moment, line = time.monotonic(), rf"^\[rank 0/{len(self.running)}\] (step|epoch)"
        wait_until(lambda: any(when > moment and re.match(line, text)
                               for when, text in self.lines()), self.output, timeout=180)
        time.sleep(self.rng.uniform(0, 1.5))  # so that the next event comes at any moment

    def event(self, kind):
        """Something happens to a machine; afterwards, self.running are those that train."""
        there = sorted(self.running)
        if kind == "cut" and there == [self.host]:  # it could only wait until it is back
            kind = "worker"
        node = self.rng.choice({
            "kill host": [self.host],
            "cut": [node for node in there if node != self.host],
            "return": [node for node in NODES if node not in there],
        }.get(kind, there))
        self.story.append(f"{kind} {node}{' (host)' if node == self.host else ''}")
        if kind == "return":
            self.start(node)
        elif kind == "worker":
            name = os.path.basename(self.script)
            os.kill(next(pid for pid, line in family(self.running[node].process).items()
                         if name in line), signal.SIGKILL)
        elif kind == "cut":  # the others go on without it, and it comes back by itself
            self.lab("cut", node)
            job = self.running.pop(node)
            self.go_on()
            self.lab("mend", node)
            self.running[node] = job
        else:
            self.leave(node, kind)

    def leave(self, node, kind):
        if kind == "SIGTERM":
            self.running[node].process.terminate()  # torchrun's: launch/lab has become it
        else:
            self.lab("kill", node)
        self.running.pop(node).result(90)
        if node == self.host or not self.running:  # the others end, too
            for job in self.running.values():
                left = job.result(180)
                assert kind == "SIGTERM" or any(text in left.output for text in LOST), left.output
            self.running.clear()
            self.start_all()

    def play(self, events):
        self.start_all()
        self.go_on()
        for kind in events:
            if kind == "return" and len(self.running) == len(NODES):
                self.event("kill")
                self.go_on()
            self.event(kind)
            self.go_on()
        for job in self.running.values():
            job.process.terminate()
        for job in self.running.values():
            job.result(90)
        check([line for _, line in self.lines()], self.shared)
        first, *others = [torch.load(self.path(node), weights_only=True) for node in self.running]
        if self.script == TEMPLATE:
            assert len({self.path(node).read_bytes() for node in self.running}) == 1
            validated = range(20, first["step"] - first["due"] + 1, 20)
            assert [row["step"] for row in first["rows"]] == [*validated]
        for other in others if self.script == LESSON else []:
            apart = abs(other["next_epoch"] - first["next_epoch"])
            assert apart <= self.save_every and (apart or difference(first, other) == 0)

    def lines(self):
        return sorted(item for job in self.jobs for item in list(job.lines))

    def output(self):
        return "\n".join([str(self.story), *(line for _, line in self.lines())])


def check(lines, shared):
    """Raise AssertionError if what the script printed tells of a loss.

    shared: whether all machines have the same disk. (A rank that fails may abort as it exits: that
    is torch's fault. Those that end well must not: test_faults.py.)
    """
    on_disk, members, done, newest = {}, [], 0, None
    for line in lines:
        if not (m := re.match(r"\[rank 0/\d\] (.*)", line)):
            continue
        line = m[1]
        if re.match(r"machine |attempt \d+, gloo: rank 0 ", line):
            members = []
        if m := re.match(r"(?:attempt .*: rank \d is on )?(node\d)\b.* cpu", line):
            members.append("all" if shared else m[1])
        if re.match(r"(data: )?\d+ \+ \d+ ", line):  # the attempt begins
            done, newest = 0, max(on_disk.get(node, 0) for node in members)
        if m := re.match(r"resumed from .* (?:after step (\d+),|at epoch (\d+)$)", line):
            done = int(m[1]) if m[1] else int(m[2]) - 1
        if m := re.match(r"(?:step|epoch) +(\d+)/\d+ \| loss", line):
            if newest is not None:  # the first report of an attempt
                assert done >= newest, f"{newest} was saved, not {done}"
                on_disk |= dict.fromkeys(members, done)
                newest = None
            done += 1
            assert int(m[1]) == done, f"{line}: not {done}"
        if m := re.match(r"(?:step|epoch) +(\d+)/.* saved in", line):
            assert int(m[1]) == done, f"{line}: not {done}"
            on_disk |= dict.fromkeys(members, done)


def play(script, shared, events):
    """Play a round of these events; whatever else is drawn follows from a seed."""
    seed = random.randrange(10**6)
    with tempfile.TemporaryDirectory() as folder, Lab(folder, 3) as lab:
        a_round = Round(seed, lab, pathlib.Path(folder), shared, script)
        try:
            a_round.play(events)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}\n{a_round.output()}\n{error}") from None


@pytest.mark.parametrize("script", [TEMPLATE, LESSON])
def test_machines_that_come_and_go(script, rounds):
    """In random order, each with its own disk. (More of it: --rounds 20.)"""
    for _ in range(max(1, rounds // 3)):
        events = ["SIGTERM", "kill", "worker", "cut", "return"]
        random.shuffle(events)
        play(script, False, events)


@pytest.mark.parametrize("script", [TEMPLATE, LESSON])
def test_machines_with_one_disk_lose_their_rendezvous(script):
    play(script, True, ["kill host", "return"])
    assert all(f'"{message}"' in shown.PITFALLS.read_text() for message in LOST)
