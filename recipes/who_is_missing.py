"""My job hangs until its timeout: which rank is missing, and in which line?

    save_record_at_sigterm(folder)  # in the main thread. A folder that all ranks can reach
    try:
        train()
    finally:
        save_record(folder)  # of this rank (process), before destroy_process_group()
    # After the job, in any Python:
    print("\n".join(describe(*first_difference(load_records(folder, world_size)))))

This is for Gloo (CPUs); for NCCL, see the end. The ranks wait for each other in collective calls
(all_reduce, broadcast, ...). The error of a timeout does not say which rank is missing, nor where
that rank is. But torch keeps a record of the last 2000 calls of each rank, its flight recorder. The
first call that differs between the ranks shows where to look.

    torchrun --standalone --nproc-per-node=2 recipes/who_is_missing.py

    [rank 0/2] validate_on_rank_0: call 4 is the first that differs
    [rank 0/2]   rank 0 called all_reduce Float[7] in validate (who_is_missing.py:214)
    [rank 0/2]   rank 1 called broadcast Float[9] in validate_on_rank_0 (who_is_missing.py:197)
    [rank 0/2] the error says only: Timed out waiting 1000ms for recv operation to complete
    [rank 0/2] stuck_in_loader: call 4 is the first that differs
    [rank 0/2]   rank 0 called all_reduce Float[4] in average_gradients (who_is_missing.py:210)
    [rank 0/2]   rank 1 made 3 calls, and no call 4
    [rank 0/2] both faults found: the rank, and the line of each call that was made

Float[7] is a tensor's type and size. Do not gather the records by a collective call: the group is
broken. When one rank has failed, torchrun ends the others by SIGTERM. Python then skips "finally",
and runs no handler of signal.signal() as long as the rank waits in a call: hence
save_record_at_sigterm(). It also prints the line in which the rank is. Gloo's record lacks
dist.send and dist.recv.

TORCH_DISTRIBUTED_DEBUG=DETAIL reports both faults without records. But it makes the ranks compare
each call, and with Gloo it crashes DistributedDataParallel (DDP) on CPUs (torch 2.11 and 2.15).

With NCCL, torch itself writes the records at a timeout (documented, not run here). Set for all
ranks TORCH_FR_DUMP_TEMP_FILE=/shared/fr_; "torchfrtrace /shared -p fr_" compares them. That tool
does not read Gloo's (KeyError). To see the stacks and records of all ranks in a browser while a job
hangs, there is torch.distributed.debug.start_debug_server() (experimental, not run here).
"""

import faulthandler
import linecache
import os
import pathlib
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d  # private: torch has no public function for the record

TIMEOUT = timedelta(seconds=1)  # for the demonstration; yours is that of init_process_group()
TORCH = os.path.dirname(torch.__file__)


def save_record(folder):
    """Write this rank's record to a file. Works after an error, too, and without the other ranks.

    folder: a new one for each run, or an old record would be compared with a new one.
    The default is the last 2000 calls; the environment variable TORCH_FR_BUFFER_SIZE sets another
    number before the first group is made, and 0 switches the recorder off.
    """
    os.makedirs(folder, exist_ok=True)
    path = pathlib.Path(folder, f"rank{dist.get_rank()}")
    part = path.with_suffix(f".{threading.get_native_id()}")  # two threads may save at once
    # Of Gloo's groups. For NCCL's in torch 2.15: _dump_fr_trace(backend="nccl2") (not run).
    part.write_bytes(_distributed_c10d._dump_fr_trace())
    part.replace(path)  # whoever sees the file sees all of it


def save_record_at_sigterm(folder):
    """From now on, let SIGTERM write this rank's record, and then end it.

    A handler of signal.signal() would wait until the main thread is back in Python. set_wakeup_fd()
    tells a thread at once. (To block the signal, for sigwait() in a thread, is not enough: threads
    that numpy has started do not block it, and the process can die.) A process has one wakeup fd.
    If other code sets it, too (as template/ does), the later call disables the earlier one.
    """
    here, there = socket.socketpair()
    there.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # otherwise the signal ends the process
    signal.set_wakeup_fd(there.fileno())

    def wait():
        while here.recv(1)[0] != signal.SIGTERM:  # other signals come here, too
            pass
        try:
            faulthandler.dump_traceback()  # all threads, to stderr: the line that the rank is in
            if dist.is_initialized():
                save_record(folder)
        except Exception:
            traceback.print_exc()  # a full disk, say
        finally:  # otherwise the rank would live on
            os._exit(128 + signal.SIGTERM)

    def in_fork():  # otherwise a child's signals would come here
        there.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=in_fork)
    threading.Thread(target=wait, daemon=True).start()


def load_records(folder, world_size, patience=10):
    """Return each rank's record, in rank order; None for a rank that writes none in patience s."""
    paths = [pathlib.Path(folder, f"rank{rank}") for rank in range(world_size)]
    deadline = time.monotonic() + patience  # the ranks do not fail in the same moment
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.02)
    # A pickle can run code: read your own files only.
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]


class Call(NamedTuple):
    """What a rank did where the ranks differ."""

    kind: str = ""  # all_reduce, say; "" if the rank did not get so far
    sizes: str = ""  # with the type in front: Float[4]
    frame: dict | None = None  # the innermost line that is not torch's
    made: int | None = None  # how many calls a rank made that did not get so far


def first_difference(records, group="default_pg"):
    """Find the first call that is not the same on all ranks of a process group.

    records: as load_records() returns them. group: the group_desc that new_group() got.
    Return (number of the call, {rank: Call, or None without a record}), with number None if all
    made the same calls. All ranks must be in the group.
    """
    made = {}  # {rank: {number of the call: call}}
    for rank, record in enumerate(records):
        if record is not None:
            made[rank] = {
                entry["collective_seq_id"]: call_of(entry)
                for entry in record["entries"]
                if entry["process_group"][1] == group and not entry["is_p2p"]
            }
    numbers = sorted(set().union(*made.values()))
    if not numbers:
        raise RuntimeError(f"no calls of group {group!r}: is the recorder off? (NCCL has its own.)")
    first = max(min(calls, default=1) for calls in made.values())  # older ones can be gone
    for number in range(first, numbers[-1] + 1):
        calls = {
            rank: calls.get(number, Call(made=max(calls, default=0)))
            for rank, calls in made.items()
        }
        # The frames may differ: ranks often make one call from an if and from its else.
        if len({(call.kind, call.sizes) for call in calls.values()}) > 1:
            return number, {rank: calls.get(rank) for rank in range(len(records))}
    return None, {rank: None for rank in range(len(records)) if rank not in made}


def call_of(entry):
    kind, sizes = entry["profiling_name"].partition(":")[2], ""  # "gloo:all_reduce"
    if not kind.startswith(("scatter", "all_to_all")):  # there, the ranks' tensors differ in size
        tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
        sizes = " ".join(f"{dtype}{size}" for dtype, size in tensors)
    frames = [frame for frame in entry["frames"] if not frame["filename"].startswith(TORCH)]
    return Call(kind, sizes, frames[0] if frames else None)


def describe(number, calls):
    """Return a line for each rank, with one above them, about what first_difference() found."""
    lines = [
        f"call {number} is the first that differs"
        if number
        else "all calls have one kind and size (the record has no src, dst and op)"
    ]
    for rank, call in calls.items():
        if call is None:
            lines.append(f"rank {rank} wrote no record: it is dead, or busy outside torch")
        elif not call.kind:
            lines.append(f"rank {rank} made {call.made} calls, and no call {number}")
        else:
            where = "no Python function"  # with GPUs, a thread of torch's own runs backward()
            if frame := call.frame:
                where = f"{frame['name']} ({os.path.basename(frame['filename'])}:{frame['line']})"
            lines.append(f"rank {rank} called {call.kind} {call.sizes} in {where}")
    return lines


def validate_on_rank_0(group, folder):
    """A classic mistake: rank 0 alone validates, and validate() makes a collective call."""
    for _ in range(3):
        average_gradients(group)
    if dist.get_rank() == 0:
        validate(group)
    dist.broadcast(torch.ones(9), src=0, group=group)  # the others wait here for rank 0


def stuck_in_loader(group, folder):
    """The last rank does not come back from loading its fourth batch."""
    for batch in range(4):
        if batch == 3 and dist.get_rank() == dist.get_world_size() - 1:
            load_records(folder, 1)  # stands for a loader that hangs: until rank 0 has given up
            return
        average_gradients(group)


def average_gradients(group):
    dist.all_reduce(torch.ones(4), group=group)  # stands for loss.backward() with DDP


def validate(group):
    dist.all_reduce(torch.ones(7), group=group)


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with tempfile.TemporaryDirectory() as folder:  # each rank makes one; all use that of rank 0
        show_both(gathered(folder)[0])
        dist.barrier()  # the folder is needed up to here
    dist.destroy_process_group()


def show_both(folder):
    error, number, calls = hang(validate_on_rank_0, folder)
    log(f"the error says only: {error}")
    if number != 4 or not (
        is_call(calls[0], "all_reduce", "validate")
        and all(is_call(call, "broadcast", "validate_on_rank_0") for call in calls[1:])
    ):
        raise RuntimeError(f"the call that rank 0 made alone is not found: {number}, {calls}")
    error, number, (*others, last) = hang(stuck_in_loader, folder)
    if (
        number != 4
        or not last
        or (last.kind, last.made) != ("", 3)
        or not all(is_call(call, "all_reduce", "average_gradients") for call in others)
    ):
        raise RuntimeError(f"the rank that is missing is not found: {number}, {others}, {last}")
    log("both faults found: the rank, and the line of each call that was made")


def is_call(call, kind, function):
    """Whether it is a call of that kind, in that function, in a line that does make it."""
    frame = call.frame if call else None
    line = linecache.getline(frame["filename"], frame["line"]) if frame else ""
    return f"dist.{kind}(" in line and call.kind == kind and frame["name"] == function


def hang(fault, folder):
    """Run into a timeout; return (error, number of the call, each rank's call)."""
    name, error = fault.__name__, ""
    folder = os.path.join(folder, name)
    # A group for each fault, because a timeout breaks the group.
    group = dist.new_group(timeout=TIMEOUT, group_desc=name)
    dist.barrier()  # so that TIMEOUT can be short
    try:
        fault(group, folder)
    except RuntimeError as caught:
        error = str(caught).rpartition("] ")[2]  # without the place in Gloo's source
    finally:
        save_record(folder)
    number, calls = first_difference(load_records(folder, dist.get_world_size()), group=name)
    first, *lines = describe(number, calls)
    for line in (f"{name}: {first}", *(f"  {line}" for line in lines)):
        log(line)
    # When one rank has timed out, those that wait for it get "Connection closed by peer".
    errors = [error for error in gathered(error) if "Timed out" in error]
    return (errors or ["no timeout"])[0], number, [*map(calls.get, range(dist.get_world_size()))]


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
