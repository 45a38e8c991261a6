"""How can the other ranks go on when one has died, without a restart?

    model = None  # it holds the old group. So does the error: do this after its "except" has ended
    leave_group()
    before, members = members, meet(store, meeting, me, step, members)  # who is still here?
    if len(members) == len(before): raise RuntimeError(fault)  # all are: the error is your own
    join_group(store, meeting, me, members)  # init_process_group() with a PrefixStore
    step = take_newest_state(net, optimizer, step)  # of the rank with the most steps
    model = DDP(net)

This is for Gloo on CPUs, and for processes that you start yourself: torchrun ends all ranks when
one dies. Each rank is a process. When one dies, the others get an error in the step that they
share. They agree on who is left, through a store of keys and values. A further process holds it.
They make a new group, and repeat the step with its whole batch. In your "except", keep the error
as a text: fault = traceback.format_exc(). If nobody is missing, it is yours, and comes every time.

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
other. A rank that raises an exception of its own ends the whole job: that is no death.

All survivors go on from one state, that of the rank with the most steps. The process with the store
must live. A rank that hangs counts as dead after the timeout, and ends when it comes back.

NCCL was not tried: there torch by default ends the process after a failure, so the group has to be
aborted first. Torch 2.15 has dist.shrink_group(dead, shrink_flags=distributed_c10d.SHRINK_ABORT),
not for Gloo, and init_process_group(enable_reconfigure=True). torchft is made for this: by its
documentation, it finds dead ranks by heartbeats, and lets new ones join. None of them was run here.
"""

import argparse
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
KILL_STEP = 5
START = 60  # seconds: the first meeting waits for all processes, at most so long
TIMEOUT = timedelta(seconds=10)  # a rank that makes the others wait for longer counts as dead
# A later meeting waits this long after its first process has come, and leaves out who is not there.
# A survivor notices a death only in a collective call: yours must be longer than the time between
# two of them.
WINDOW = 2  # seconds


def train(me, store, job):
    """The right way: train in one group after the other, until one of them finishes.

    me: the number of this process, which it keeps. Its rank is its place among the members.
    Return the members of the last group; None if the others have gone on without this process.
    """
    members, fault = list(range(RANKS)), None
    for meeting in itertools.count():
        found = meet(store, meeting, me, job.step, members)
        if me not in found:
            return None  # the others took this process for dead, and are steps ahead
        if fault and len(found) == len(members):  # also an error in your model comes to this line
            raise RuntimeError(f"no rank has died, but:\n{fault}")
        job.gone, members = sorted(set(members) - set(found)), found
        try:
            train_together(store, meeting, me, members, job)
            return members
        except RuntimeError:
            fault = traceback.format_exc()  # as a text: the exception itself would keep DDP alive
        leave_group()


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


def train_together(store, meeting, me, members, job):
    """Train to the end in a group of the members. Raise RuntimeError when one of them dies."""
    join_group(store, meeting, me, members)
    job.step = take_newest_state(job.net, job.optimizer, job.step)
    model = DDP(job.net)
    report(store, meeting, members, job)
    take_steps(model, me, members, job, share)
    dist.barrier()  # stay until all have taken the last step: one may have to repeat it


def join_group(store, meeting, me, members):
    """Make a group of the members. Without the prefix, they would read the dead rank's address."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"group {meeting}", store), timeout=TIMEOUT,
        rank=members.index(me), world_size=len(members))


def take_newest_state(net, optimizer, step):
    """Give all ranks the state of rank 0, which has taken the most steps. Return their number.

    When a rank dies, one survivor may have got the gradients of all and the other an error. Then
    the first is one step ahead. Another call before optimizer.step() would not help: it could fail
    in the same way. So the newest state counts: it has the gradients of all ranks. Add all else
    that your step changes: the schedule, a scaler, random states.
    """
    state = [(net.state_dict(), optimizer.state_dict(), step)]
    dist.broadcast_object_list(state, src=0)
    # All of it has come: if rank 0 dies now, the state here is not half old and half new.
    of_net, of_optimizer, step = state[0]
    net.load_state_dict(of_net)
    optimizer.load_state_dict(of_optimizer)
    return step


def take_steps(model, me, members, job, share):
    while job.step < STEPS:
        rows = share(me, members)
        job.optimizer.zero_grad()  # also what a failed step has left behind
        if (me, job.step) == job.kill:
            die(job.store, job.step)
        loss_of(model, batch_of(job.step)[rows]).backward()  # an error if a rank is gone
        # No collective call from here to the end: the step is taken as a whole or not at all.
        job.optimizer.step()
        job.seen += [(job.step, row) for row in rows]
        job.step += 1


def share(me, members):
    """Right: the rows of the batch, dealt out to the members."""
    return range(members.index(me), BATCH, len(members))


def old_share(me, members):
    """Wrong: each keeps the rows that it had with all ranks. Nobody takes those of the dead."""
    return range(me, BATCH, RANKS)


def leave_group():
    """Free this process from a broken group, so that it can join another."""
    gc.collect()  # what is left of DDP would keep the old group alive
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    args = parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # mp.spawn and torchrun would end all processes when one dies.
    processes = [mp.get_context("spawn").Process(
        target=worker, args=(me, store.port, args.kill), daemon=True) for me in range(RANKS)]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(running):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode > 0:  # not a signal but an exception: a fault of the program
                stop("a process has failed, see above", status=1)  # and end the others
    if not store.check(["finished"]):
        raise RuntimeError("no process has finished")


def worker(me, port, kill):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False,
                          timeout=timedelta(seconds=START))
    job = Job(kill=(kill, KILL_STEP), store=store)
    members = train(me, store, job)
    if members:
        compare(me, members, job)
        store.set("finished", "")
        leave_group()
    else:
        print(f"process {me} came too late: the others have gone on without it", file=sys.stderr)


def report(store, meeting, members, job):
    """Log the members of a new group; keep the state from which they go on, to compare with."""
    shares = f"{BATCH // len(members)} of {BATCH} rows each"
    if meeting == 0:
        log(f"{len(members)} ranks start, {shares}")
        return
    job.went_on_with = copy.deepcopy((job.net, job.optimizer.state_dict(), job.step))
    step, moment = store.get("died").decode().split()  # of the last one
    gone, seconds = " and ".join(map(str, job.gone)), time.monotonic() - float(moment)
    log(f"rank {gone} of {RANKS} died in step {step}; {seconds:.1f} s later,"
        f" {len(members)} ranks go on in step {job.step}, {shares}")


def compare(me, members, job):
    plain = Job()  # one process, which takes all rows of each batch
    for step in range(STEPS):
        plain.optimizer.zero_grad()
        loss_of(plain.net, batch_of(step)).backward()
        plain.optimizer.step()

    # The wrong way, from the state in which the survivors went on.
    wrong = Job()
    net, optimizer, first = job.went_on_with
    wrong.net.load_state_dict(net.state_dict())
    wrong.optimizer.load_state_dict(optimizer)
    wrong.step = first
    take_steps(DDP(wrong.net), me, members, wrong, old_share)

    rows, lost, off = (STEPS - first) * BATCH, {}, {}
    for way, done in [("shares dealt anew", job), ("old shares kept", wrong)]:
        seen = {row for rows in gathered(done.seen) for row in rows if row[0] >= first}
        lost[way] = rows - len(seen)
        off[way] = max((a - b).abs().max().item() for a, b in zip(
            done.net.parameters(), plain.net.parameters(), strict=True))
        log(f"{way:<17} {lost[way]:>2} of {rows} rows never seen, weights off by {off[way]:.1e}")
    if lost["shares dealt anew"] or off["shares dealt anew"] > 1e-6:
        raise RuntimeError("the survivors did not train as one process does")
    if not (lost["old shares kept"] and off["old shares kept"] > 1e-4):
        raise RuntimeError("the mistake does not show what this file says")
    log(f"{STEPS} steps with {RANKS} ranks, then {len(members)}: the weights of one process, up to"
        " rounding")


class Job:
    """What a process trains, and what is shown of it."""

    def __init__(self, kill=None, store=None):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.step = 0  # steps taken
        self.kill, self.store = kill, store  # (process, step): dies there, and says when
        self.seen = []  # (step, row)
        self.gone, self.went_on_with = [], None  # at the last meeting


def batch_of(step):
    """The rows of a step depend on its number alone: so a step can be repeated."""
    return torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))


def loss_of(model, rows):
    return (model(rows) - 1).square().mean()  # the shares are of one size


def die(store, step):
    store.set("died", f"{step} {time.monotonic()}")
    os.kill(os.getpid(), signal.SIGKILL)


# ---- Helpers that are no part of the lesson ----


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("--kill", type=int, default=1, choices=range(RANKS), metavar="RANK",
                        help="which rank dies (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
