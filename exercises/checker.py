"""Runs an exercise on 2 and on 3 real processes, and says what is not right yet. Not to be read.

    python exercises/03_average_gradients.py              # check what you wrote
    python exercises/03_average_gradients.py --hint       # with a second hint
    python exercises/03_average_gradients.py --solution   # check the solution in its place

An exercise has a function trial(), which calls what the learner wrote on each rank. It says by
expect() what must hold, and returns the figures to print when all is right. A trial(life, folder)
may end a rank by die(): then all ranks end, and new ones begin with life 1, 2, ...
"""

import argparse
import gc
import inspect
import linecache
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch._dynamo  # by an optimizer, or Exchanges: else each rank loads it anew, for seconds
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count bytes
from torch.utils._pytree import tree_leaves

LIMIT = 8  # seconds for a trial: one that hangs is ended then
# A fork is quick, as torch is loaded already, and safe, as it has not been used.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
SOLUTIONS = Path(__file__).parent / "solutions"
# What a rank sends at least, in parts of all the bytes of the call, over n ranks.
SENT = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "gather": lambda n: 1 / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "send": lambda n: 1,
}


class NotYet(Exception):
    """What is not right, in words, and two hints."""


def expect(right, wrong, hint, second_hint=""):
    """Go on if right is true. Else end the trial: say what is wrong, and the hint."""
    if not right:
        raise NotYet(wrong, hint, second_hint)


class Exchanges(TorchDispatchMode):
    """Counts the exchanges inside a "with": calls is [(kind, bytes sent at least)]."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        result = call(*args, **kwargs or {})
        if call.namespace in ("c10d", "_c10d_functional"):
            name = call._opname.replace("_", "")  # _allgather_base_, all_gather_into_tensor
            kind = next((kind for kind in SENT if name.startswith(kind.replace("_", ""))), None)
            if kind:
                size = max(sum(t.nbytes for t in tree_leaves(one) if torch.is_tensor(t))
                           for one in (*args, result))
                self.calls.append((kind, SENT[kind](dist.get_world_size()) * size))
        return result

    def bytes_sent(self):
        return round(sum(size for _, size in self.calls))


def bytes_kept(*but_not):
    """Return the bytes of all tensors that this process holds, those of but_not apart."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    skip = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(but_not)}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in skip)


# ---- The command ----


def main(exercise):
    """Check the exercise on 2 and on 3 ranks; end with status 1 if it is not solved."""
    exercise = Path(exercise).resolve()
    parser = argparse.ArgumentParser()
    parser.add_argument("--hint", action="store_true", help="say more where something is wrong")
    parser.add_argument("--solution", action="store_true", help="check the solution, not yours")
    args = parser.parse_args()
    answer = SOLUTIONS / exercise.name if args.solution else None
    if not solved(exercise, answer, args.hint):
        sys.exit(1)
    print(f"Solved. One way to write it, and why: exercises/solutions/{exercise.name}")


def solved(exercise, answer=None, second_hint=False):
    """Check it on 2 and on 3 ranks, and print what comes out."""
    for world_size in (2, 3):
        right, text = verdict(run(exercise, world_size, answer), second_hint)
        for line in f"{world_size} ranks: {text}".splitlines():
            print(textwrap.fill(line, 100, subsequent_indent=6 * " ", break_on_hyphens=False),
                  flush=True)
        if not right:
            return False
    return True


@dataclass
class Report:
    """What one rank has to say: right, empty, wrong, error, waits, killed, died, or nothing."""

    rank: int
    kind: str = "nothing"
    text: str = ""
    hints: list = field(default_factory=list)


def verdict(reports, second_hint=False):
    """Return (is it right, what to print)."""
    if all(report.kind == "right" for report in reports):
        return True, f"right{': ' * bool(reports[0].text)}{reports[0].text}"
    by_kind = {report.kind: report for report in reversed(reports)}  # of the lowest rank
    for kind in ("empty", "wrong", "died", "error", "killed"):
        if kind not in by_kind:
            continue
        found = by_kind[kind]
        text = f"not yet. Rank {found.rank}: {found.text}"
        hints = [hint for hint in found.hints if hint][: 1 + second_hint]
        more = len(found.hints) > 1 and found.hints[1] and not second_hint
        return False, "\n    ".join([
            text, *(f"hint: {hint}" for hint in hints), *["(--hint says more)"] * bool(more)])
    ends = {"right": "has come to the end", "nothing": "gives no answer"}
    lines = [f"rank {one.rank} {ends.get(one.kind, one.text)}" for one in reports]
    hint = ("hint: each waits for its partner: for all others to make the same call with tensors of"
            " the same size, or for the recv that belongs to its send, or for the wait() of what"
            " isend or irecv has returned")
    return False, "\n    ".join(
        [f"not yet. After {LIMIT} s, it stands still:", *lines, hint])


# ---- The processes ----


def run(exercise, world_size, answer=None, start_method=START_METHOD):
    """Run the trial on so many processes; return a Report for each rank.

    answer: a file whose functions take the place of those in the exercise.
    """
    with tempfile.TemporaryDirectory() as folder:
        for life in range(10):
            reports = run_once(exercise, world_size, answer, start_method, life, folder)
            if all(report.kind != "killed" for report in reports):
                break
    return reports


def run_once(exercise, world_size, answer, start_method, life, folder):
    context = multiprocessing.get_context(start_method)
    ends, workers = {}, []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        workers.append(context.Process(target=worker, daemon=True, args=(
            exercise, answer, rank, world_size, life, folder, theirs)))
        workers[-1].start()
        theirs.close()  # so that we see when the process has ended
        ends[ours] = rank
    reports = [Report(rank) for rank in range(world_size)]
    deadline = time.monotonic() + LIMIT + 60  # a process that has not even begun by then
    while ends and (ready := wait(list(ends), max(0, deadline - time.monotonic()))):
        for end in ready:
            rank = ends.pop(end)
            try:
                reports[rank] = Report(rank, *end.recv())
            except EOFError:
                workers[rank].join(5)
                status = workers[rank].exitcode
                kind = "killed" if status == -signal.SIGKILL else "died"
                reports[rank] = Report(rank, kind, f"the process has ended, with status {status}", [
                    "do all ranks exchange tensors of the same size and dtype, in the same order?"])
            if reports[rank].kind != "right":  # others may only fail because of this one
                deadline = min(deadline, time.monotonic() + 1)
    for process in workers:
        process.kill()
        process.join()
    return reports


def worker(exercise, answer, rank, world_size, life, folder, answers):
    """One rank: run the trial, and send (kind, text, hints)."""
    sys.stdout = sys.stderr = Prefixed(f"[rank {rank}/{world_size}] ")
    torch.set_num_threads(1)
    gc.freeze()  # bytes_kept then looks only through what comes from now on
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))
    own, saying, thread = answer or exercise, threading.Lock(), threading.get_ident()

    def say(*what):
        if saying.acquire(blocking=False):  # once
            answers.send(what)

    def give_up():
        stack = traceback.extract_stack(sys._current_frames()[thread])
        where = [frame for frame in stack if frame.filename == str(own)] or stack
        say("waits", f"waits in line {where[-1].lineno}: {where[-1].line}")

    try:
        names = load(exercise, answer)
        dist.init_process_group("gloo", f"file://{folder}/meet-{life}", rank=rank,
                                world_size=world_size, timeout=timedelta(seconds=LIMIT + 60))
        timer = threading.Timer(LIMIT, give_up)
        timer.daemon = True
        timer.start()
        asked = inspect.signature(names["trial"]).parameters
        given = {"life": life, "folder": Path(folder)}
        figures = names["trial"](**{name: given[name] for name in asked})
    except NotYet as error:
        wrong, *hints = error.args
        say("wrong", wrong, hints)
    except Exception as error:
        code = list(traceback.walk_tb(error.__traceback__))[-1][0].f_code
        if isinstance(error, NotImplementedError) and code.co_filename == str(own):
            task = (code.co_consts[0] or "").partition("\n")[0]
            where = f"{code.co_name}, line {code.co_firstlineno},"
            say("empty", f"{where} is still empty. To do:\n    {task}")
        else:
            say("error", describe(error, own))
    else:
        timer.cancel()
        say("right", figures or "")
    threading.Event().wait()  # for the end from outside: others may still wait for this rank


def die():
    """End this rank at once, as a machine that fails does."""
    os.kill(os.getpid(), signal.SIGKILL)


def load(exercise, answer=None):
    """Return the names of the exercise, with those of the answer in their place."""
    names = {"__name__": "exercise"}
    for path in [exercise] + [answer] * bool(answer):
        exec(compile(Path(path).read_text(), str(path), "exec"), names)  # noqa: S102
    return names


def describe(error, own):
    """Say what an exception is, with the learner's lines of the traceback alone."""
    lines, stack = ["an exception:"], traceback.extract_tb(error.__traceback__)
    for frame in [f for f in stack if f.filename == str(own) and f.name != "trial"] or stack[-1:]:
        line = linecache.getline(frame.filename, frame.lineno).strip()
        lines.append(f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {line}")
    return "\n    ".join([*lines, f"{type(error).__name__}: {error}"])


class Prefixed:
    """Standard output with the rank in front of each line."""

    def __init__(self, prefix):
        self.prefix, self.rest = prefix, ""

    def write(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            os.write(1, f"{self.prefix}{line}\n".encode())
        return len(text)

    def flush(self):
        pass
