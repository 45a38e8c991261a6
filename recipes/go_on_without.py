"""How can the other ranks go on when one has died, without a restart?

    fault, members = None, list(range(RANKS))
    for meeting in itertools.count():  # in each turn, one group trains until a rank dies
        before, members = members, meet(store, meeting, me, job.step, members)  # who is here?
        if me not in members: break  # the others took this process for dead, and are steps ahead
        if fault and len(members) == len(before): raise RuntimeError(fault)  # an error of your own
        try:
            join_group(store, meeting, me, members)  # init_process_group() with a PrefixStore
            take_newest_state(job)  # of the rank with the most steps
            train(DDP(job.net), me, members, job)
            dist.barrier()  # stay until all have taken the last step: one may have to repeat it
            break
        except RuntimeError:
            fault = traceback.format_exc()  # a text: the error itself would hold the old group
        leave_group()

This is for Gloo on CPUs, and for processes that you start yourself: torchrun ends all ranks when
one dies. Each rank is a process. When one dies, the others get an error in the step that they
share. They agree on who is left, through a store of keys and values. A further process holds it.
They make a new group, and repeat the step with its whole batch. If nobody is missing, the error is
yours, and comes every time.

    python recipes/go_on_without.py

    [rank 0/3] 3 ranks start, 4 of 12 rows each
    [rank 0/2] rank 1 of 3 died in step 5; 3.3 s later, 2 ranks go on in step 5, 6 of 12 rows each
    [rank 0/2] shares dealt anew  0 of 60 rows never seen, weights off by 1.8e-07
    [rank 0/2] old shares kept   20 of 60 rows never seen, weights off by 2.4e-02
    [rank 0/2] 10 steps with 3 ranks, then 2: the weights of one process, up to rounding

Unlike with a restart, no process starts anew, no snapshot is read, and at most the work of one step
is lost. But the survivors must deal out the batch anew. To keep the old shares is a common mistake:
there is no error, and the dead rank's rows are lost in every step. The number of ranks must divide
the batch, too. Otherwise weigh each rank's loss: unequal_micro_batches.py. "Off" is the distance
from the weights of one process. Of the seconds, 2 are WINDOW: how long the survivors wait for each
other. It must be longer than a step: else a RuntimeError of one rank alone shuts out the others.
Any other exception ends the whole job: that is no death.

All survivors go on from one state, that of the rank with the most steps. The process with the store
must live. A rank that hangs counts as dead after the timeout, and ends when it comes back.

NCCL was not tried: torch by default ends the process after a failure. Torch 2.14 has
dist.shrink_group() for NCCL, and init_process_group(enable_reconfigure=True) with private calls.
torchft is made for this: by its documentation, it finds dead ranks by heartbeats, and lets new ones
join. None was run here.
"""

import copy
import gc
import itertools
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANKS, STEPS, BATCH = 3, 10, 12  # BATCH: rows of a step over all ranks; 3, 2 and 1 divide it
KILLED, KILL_STEP = 1, 5  # this rank dies in this step
START = 60  # seconds: the first meeting waits for all processes, at most so long
TIMEOUT = timedelta(seconds=10)  # a rank that makes the others wait for longer counts as dead
# A later meeting waits this long after its first process has come, and leaves out who is not there.
# A survivor notices a death only in a collective call: yours must be longer than the time between
# two of them. If a rank dies while they join, some notice after TIMEOUT only, and may be left out.
WINDOW = 2  # seconds


def train_and_go_on(me, store, job):
    """The right way, the lines above. Return the members of the last group.

    me: the number of this process, which it keeps. Its rank is its place among the members.
    """
    fault, members = None, list(range(RANKS))
    for meeting in itertools.count():
        before, members = members, meet(store, meeting, me, job.step, members)
        if me not in members:
            break
        if fault and len(members) == len(before):  # also an error in your model comes to this line
            raise RuntimeError(f"no rank has died, but:\n{fault}")
        try:
            join_group(store, meeting, me, members)
            take_newest_state(job)
            report(store, sorted(set(before) - set(members)), job)
            train(DDP(job.net), me, members, job)
            dist.barrier()
            break
        except RuntimeError:
            fault = traceback.format_exc()
        leave_group()
    return members


def meet(store, meeting, me, step, expected):
    """Agree on who is here. Return the members, those with the most steps first.

    All survivors get the same list, and one that comes too late gets a list without itself. Raise
    RuntimeError if somebody is missing at the first meeting, or if the store is gone.
    """
    store = dist.PrefixStore(f"meeting {meeting}", store)
    store.set(str(me), str(step))
    here = [str(member) for member in expected]
    deadline = time.monotonic() + (WINDOW if meeting else START)
    while not store.check(here) and time.monotonic() < deadline:
        time.sleep(0.01)  # store.wait() would print warnings when somebody does not come
    here = [member for member in here if store.check([member])]
    if meeting == 0 and len(here) < len(expected):
        raise RuntimeError(f"of {expected}, only {here} have come to the start")
    here.sort(key=lambda member: -int(store.get(member)))
    # Two survivors can see different lists here. The store keeps the first one, for all.
    here = store.compare_set("members", "", " ".join(here))
    return [int(member) for member in here.split()]


def join_group(store, meeting, me, members):
    """Make a group of the members. Without the prefix, they would read the dead rank's address."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"group {meeting}", store),
        timeout=TIMEOUT,
        rank=members.index(me),
        world_size=len(members),
    )


def take_newest_state(job):
    """Give all ranks the state of rank 0, which has taken the most steps.

    job: it has net, optimizer and step, the number of steps taken. Add all else that your step
    changes: the schedule, a scaler, random states.

    When a rank dies, one survivor may have got the gradients of all, and the other an error: then
    the first is one step ahead. Its state counts. (A further call before optimizer.step() would not
    help: it could fail in the same way.)
    """
    state = [(job.net.state_dict(), job.optimizer.state_dict(), job.step)]
    dist.broadcast_object_list(state, src=0)
    # All of it has come: if rank 0 dies now, the state here is not half old and half new.
    of_net, of_optimizer, job.step = state[0]
    job.net.load_state_dict(of_net)
    job.optimizer.load_state_dict(of_optimizer)


def leave_group():
    gc.collect()  # what is left of DDP would keep the old group alive
    if dist.is_initialized():
        dist.destroy_process_group()


def share(me, members):  # right: the rows of the batch, dealt out to the members
    return range(members.index(me), BATCH, len(members))


def old_share(me, members):  # wrong: nobody takes the rows of the dead
    return range(me, BATCH, RANKS)


def train(model, me, members, job, share=share):
    while job.step < STEPS:
        rows = share(me, members)
        job.optimizer.zero_grad()  # also what a failed step has left behind
        if job.store and (me, job.step) == (KILLED, KILL_STEP):
            job.store.set("died", f"{job.step} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(model, batch_of(job.step)[rows]).backward()  # an error if a rank is gone
        # No collective call from here to the end: the step is taken as a whole or not at all.
        job.optimizer.step()
        job.seen += [(job.step, row) for row in rows]
        job.step += 1


def main():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # mp.spawn and torchrun would end all processes when one dies.
    processes = [
        mp.get_context("spawn").Process(target=worker, args=(me, store.port), daemon=True)
        for me in range(RANKS)
    ]
    for process in processes:
        process.start()
    while processes:
        wait([process.sentinel for process in processes])
        if any((process.exitcode or 0) > 0 for process in processes):  # an exception, no signal
            raise SystemExit("a process has failed, see above")  # and end the others
        processes = [process for process in processes if process.is_alive()]
    if not store.check(["finished"]):
        raise RuntimeError("no process has finished")


def worker(me, port):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START))
    job = Job(store)
    members = train_and_go_on(me, store, job)
    if me in members:
        compare(me, members, job)
        store.set("finished", "")
        leave_group()
    else:
        print(f"process {me} came too late: the others have gone on without it", file=sys.stderr)


def report(store, gone, job):
    """Log the members of a new group; keep the state from which they go on, to compare with."""
    ranks = dist.get_world_size()
    shares = f"{BATCH // ranks} of {BATCH} rows each"
    if not gone:
        log(f"{ranks} ranks start, {shares}")
        return
    job.went_on_with = copy.deepcopy((job.net, job.optimizer, job.step))
    step, moment = store.get("died").decode().split()
    log(
        f"rank {gone[0]} of {RANKS} died in step {step}; {time.monotonic() - float(moment):.1f} s"
        f" later, {ranks} ranks go on in step {job.step}, {shares}"
    )


def compare(me, members, job):
    plain = Job()  # one process, which takes all rows of each batch
    train(plain.net, 0, [0], plain)
    wrong = Job()  # the wrong way, from the state in which the survivors went on
    wrong.net, wrong.optimizer, wrong.step = job.went_on_with
    first = wrong.step
    train(DDP(wrong.net), me, members, wrong, old_share)
    rows, lost, off = (STEPS - first) * BATCH, {}, {}
    for way, done in [("shares dealt anew", job), ("old shares kept", wrong)]:
        of_ranks = [None] * len(members)
        dist.all_gather_object(of_ranks, done.seen)
        seen = {row for rows in of_ranks for row in rows if row[0] >= first}
        lost[way] = rows - len(seen)
        off[way] = max(
            (a - b).abs().max().item()
            for a, b in zip(done.net.parameters(), plain.net.parameters(), strict=True)
        )
        log(f"{way:<17} {lost[way]:>2} of {rows} rows never seen, weights off by {off[way]:.1e}")
    if lost["shares dealt anew"] or off["shares dealt anew"] > 1e-6:
        raise RuntimeError("the survivors did not train as one process does")
    if not (lost["old shares kept"] and off["old shares kept"] > 1e-4):
        raise RuntimeError("the mistake does not show what this file says")
    log(
        f"{STEPS} steps with {RANKS} ranks, then {len(members)}: the weights of one process, up to"
        " rounding"
    )


class Job:
    """What a process trains, and what is shown of it."""

    def __init__(self, store=None):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.step, self.seen = 0, []  # steps taken; (step, row)
        self.store = store  # where the rank that is killed says when


def batch_of(step):
    """The rows of a step depend on its number alone: so a step can be repeated."""
    return torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))


def loss_of(model, rows):
    return (model(rows) - 1).square().mean()  # the shares are of one size


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
