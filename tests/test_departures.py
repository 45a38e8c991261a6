"""Machines leave, die and come back in random order; whatever was saved must be there.

A job of template/train.py or of 03 runs on machines of launch/lab, with a disk each, or one.
When the host of the rendezvous goes, the others end, and the job is started again. What rank 0
prints is held against what each machine must have on its disk: an attempt begins with the newest
step (or epoch) of its machines; none is left out, or trained twice but for those since a save; in
the end all disks hold the same snapshot. (03 does not save when it leaves: one may have the next.)
"""

import os
import random
import re
import signal
import time

import pytest
import shown
import torch
from digits import difference
from forked import variant
from lab import Lab
from started import family, wait_until

pytestmark = pytest.mark.long
NODES = "node1", "node2", "node3"
TEMPLATE, LESSON = "template/train.py", "03_multinode.py"
SAVE_EVERY = {TEMPLATE: 20, LESSON: 3}
WORK = {TEMPLATE: "add_up_gradients", LESSON: "train_epoch"}  # for a step, or an epoch
# What the others print. The first only if a heartbeat was due before their processes had failed.
LOST = (
    "has failed to send a keep-alive heartbeat to the rendezvous",
    "has failed to shutdown the rendezvous",
)


class Round:
    """A job on machines that come and go. The rendezvous is at node1, which is always there."""

    def __init__(self, lab, folder, shared, script, mnist_dir):
        self.lab, self.folder, self.shared, self.script = lab, folder, shared, script
        self.path_of_script = variant(
            folder,
            script,
            (  # some time is left for what runs beside
                f"REPORT_EVERY, work = 1, {WORK[script]}\n"
                f"{WORK[script]} = lambda *args: time.sleep(0.05) or work(*args)"
            ),
        )
        self.data = ["--data-dir", mnist_dir] if script == LESSON else []
        self.running, self.jobs, self.starts, self.story = {}, [], 1, []
        for node in NODES:
            self.path(node).parent.mkdir(exist_ok=True)

    def path(self, node):
        return self.folder / ("shared" if self.shared else node) / "snapshot.pt"

    def start(self, node):
        self.running[node] = self.lab.start(
            node,
            "torchrun",
            "--nnodes=1:3",
            "--nproc-per-node=1",
            "--max-restarts=50",
            f"--rdzv-id={self.starts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=node1:{29600 + self.starts}",
            "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5",
            self.path_of_script,
            100_000,
            SAVE_EVERY[self.script],
            "--batch-size",
            24,
            "--timeout",
            15,
            *self.data,
            "--snapshot-path",
            self.path(node),
        )
        self.jobs.append(self.running[node])

    def go_on(self):
        """Wait until all machines that run have trained a step together, and some time more."""
        moment, line = time.monotonic(), rf"^\[rank 0/{len(self.running)}\] (step|epoch)"
        wait_until(
            lambda: any(when > moment and re.match(line, text) for when, text in self.lines()),
            self.output,
            timeout=180,
        )
        time.sleep(random.uniform(0, 1.5))  # so that the next event comes at any moment

    def event(self, kind):
        """Something happens to a machine; afterwards, self.running are those that train."""
        away = [node for node in NODES if node not in self.running]
        node = random.choice(away if kind == "return" else [*self.running][1:])
        self.story.append(f"{kind} {node}")
        if kind == "return":
            self.start(node)
        elif kind == "worker":
            name = os.path.basename(self.script)
            os.kill(
                next(
                    pid for pid, line in family(self.running[node].process).items() if name in line
                ),
                signal.SIGKILL,
            )
        elif kind == "cut":  # the others go on without it, and it comes back by itself
            self.lab("cut", node)
            job = self.running.pop(node)
            self.go_on()
            self.lab("mend", node)
            self.running[node] = job
        else:
            if kind == "SIGTERM":
                self.running[node].process.terminate()  # torchrun's: launch/lab has become it
            else:
                self.lab("kill", node)
            self.running.pop(node).result(90)

    def lose_the_host(self):
        """The others end, too; then two machines start again."""
        self.lab("kill", "node1")
        self.running.pop("node1").result(90)
        for job in self.running.values():
            output = job.result(180).output
            assert any(text in output for text in LOST), output
        self.running, self.starts = {}, self.starts + 1
        for node in NODES[:2]:
            self.start(node)

    def end(self):
        wait_until(lambda: all(self.path(node).exists() for node in self.running), self.output)
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
            assert apart <= SAVE_EVERY[LESSON] and (apart or difference(first, other) == 0)

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
        if re.match(r"machine |attempt \d+, gloo: \w+ has rank 0 ", line):
            members = []
        if m := re.match(r"(?:attempt .*: )?(node\d)\b.*[ (]cpu", line):
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


@pytest.mark.parametrize("job", ["template, own disks", "template, one disk", "03, own disks"])
def test_machines_come_and_go(tmp_path, mnist_dir, job):
    """In random order (03: two of four kinds), own disks; or one, and the rendezvous is lost."""
    script, shared = LESSON if "03" in job else TEMPLATE, "one" in job
    groups = [["SIGTERM", "return"], ["kill", "return"], ["worker"], ["cut"]]
    groups = random.sample(groups, 4 if script == TEMPLATE else 2)
    events = ["kill"] if shared else [kind for group in groups for kind in group]
    with Lab(tmp_path, 3) as lab:
        a_round = Round(lab, tmp_path, shared, script, mnist_dir)
        try:
            for node in NODES:
                a_round.start(node)
            a_round.go_on()
            for kind in events:
                a_round.event(kind)
                a_round.go_on()
            if shared:
                a_round.lose_the_host()
                a_round.go_on()
            a_round.end()
        except AssertionError as error:
            raise AssertionError(f"{a_round.output()}\n{error}") from None
    assert all(f'"{message}"' in shown.PITFALLS.read_text() for message in LOST)
