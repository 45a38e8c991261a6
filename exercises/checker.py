"""Runs an exercise on 2 and on 3 real processes, and says what is not right yet. Not to be read.

    python exercises/03_average_gradients.py              # check what you wrote
    python exercises/03_average_gradients.py --hint       # with a second hint, where there is one
    python exercises/03_average_gradients.py --solution   # check the solution in its place

checks/ has a file for each exercise, with a function trial(). It calls what the learner wrote, the
module answer, on each rank. It says by expect() what must hold, and returns the figures to print
when all is right. A trial(life, folder) may end a rank by die(): then all ranks end, and new ones
begin with life 1, 2, ...
"""

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import inspect
import json
import linecache
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS  # private, as the next ones; only to count bytes
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# Elsewhere 2 and 3. Of 4 ranks, one is no neighbour of this one.
WORLD_SIZES = dict.fromkeys(
    ("04_ring_all_reduce.py", "09_stop_together.py", "21_mesh.py"), (2, 3, 4)
)
ASKED_TO_END, FORKING = [], []  # the signals that came; not empty while processes are started
LIMIT = 8  # seconds for a trial on an idle machine: one that hangs is ended then
# A fork is quick, as torch is loaded already, and safe, as it has not been used.
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
FOLDER = Path(__file__).resolve().parent
SOLUTIONS, REMEMBERED = FOLDER / "solutions", FOLDER / ".solved.json"
KINDS = (
    "allreduce",
    "reducescatter",
    "allgather",
    "alltoall",
    "scatter",
    "gather",
    "broadcast",
    "reduce",
    "send",
    "recv",
)


CASE = [""]  # what the check tries
HINTS = {  # pattern of an exception: what may be behind it
    "invalid tensor size|outputShape|[Ss]plit sizes|divide equally": "this exchange needs other"
    " lengths: what does each rank give, and what does each one expect? Is group= missing?",
    "File exists": "a process that died may have left it behind: the next one finds it there",
    "NoneType": "a gradient is None: may it be? If not, did all that it comes from require one?",
    "(list|tuple) index out of range|not enough values to unpack": "is it from torch.chunk? It may"
    " give fewer parts than you ask for. tensor_split gives all of them, and some may be empty",
    "process group has not been init": "does your code call destroy_process_group()? The check goes"
    " on with this group",
}
FLOAT32 = "float32 has 7 digits: which tensor on the way is float32?"


class NotYet(Exception):
    """What is not right, in words, and two hints."""


def expect(right, wrong, hint, second_hint=""):
    """Go on if right is true. Else end the trial: say what is wrong, and the hint."""
    if not right:
        raise NotYet(wrong, hint, second_hint)


@contextlib.contextmanager
def case(name):
    """Tell what is tried, if there is an exception, or if the ranks stand still."""
    CASE[0] = f"in the case '{name}'"
    yield f"{CASE[0]}:"
    CASE[0] = ""


class Exchanges(TorchDispatchMode):
    """Counts the exchanges inside a "with", also those of threads that begin there.

    calls: [(kind, bytes that this rank sends at least, whatever the algorithm)].
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __enter__(self):
        self.run_thread = run = threading.Thread.run

        def counted(thread):
            with InThread(self):
                run(thread)

        threading.Thread.run = counted
        return super().__enter__()

    def __exit__(self, *error):
        threading.Thread.run = self.run_thread
        return super().__exit__(*error)

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        kind, custom = kind_of(call), OPDEFS.get(call.name())
        if custom:  # of torch.library.custom_op, into which a mode does not see
            with InThread(self):
                return custom._init_fn(*args, **kwargs or {})
        if kind:
            names = [argument.name for argument in call._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
        for name, its in given.items() if kind else ():
            right = all(one.is_contiguous() for one in tree_leaves(its) if torch.is_tensor(one))
            wrong = "a tensor that is not contiguous {} " + kind
            if kind == "recv" or name.startswith("output"):
                expect(
                    right,
                    wrong.format("is to be filled by"),
                    "torch.empty_like(x) takes over"
                    " the strides of x; x.new_empty(x.shape) is contiguous. torch.distributed.nn"
                    " may do the former, with a gradient that is not contiguous",
                )
            expect(
                right,
                wrong.format("goes into") + ": NCCL refuses it, or sends other elements"
                " than you mean",
                "x.contiguous() is: a copy, or x itself if it is already",
            )
        result = call(*args, **kwargs or {})
        if kind and kind != "recv":
            self.calls.append((kind, sent_at_least(kind, given, result)))
        return result

    def bytes_sent(self):
        return round(sum(size for _, size in self.calls))


class Waiting(Exchanges):
    """Knows, too, for how many exchanges nobody has waited."""

    def __init__(self):
        super().__init__()
        self.works, self.waited = 0, {}
        for name in "wait", "get_future", "is_completed":
            call = getattr(dist.Work, name)
            setattr(
                dist.Work,
                name,
                lambda work, *args, call=call: (
                    self.waited.update({id(work): work}),
                    call(work, *args),
                )[1],
            )

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        self.works += bool(kind_of(call) and call.namespace == "c10d")  # others wait by themselves
        return super().__torch_dispatch__(call, types, args, kwargs)

    def look_for_waits(self, told):
        left = self.works - len(self.waited)
        expect(
            left <= 0,
            f"{told} {left} exchanges were begun, and nobody waits for them",
            "with"
            " async_op=True, a call returns at once: the sum is there when wait() returns, for"
            " each of them",
            "they need not end in the order in which they begin",
        )


class InThread(TorchDispatchMode):
    """A mode holds in one thread; this is for another."""

    def __init__(self, exchanges):
        super().__init__()
        self.exchanges = exchanges

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        return self.exchanges.__torch_dispatch__(call, types, args, kwargs)


def kind_of(call):
    """Return one of KINDS, or None if the call exchanges nothing."""
    if call.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = call._opname.replace("_", "")  # _allgather_base_, all_gather_into_tensor, isend
    return next((kind for kind in KINDS if name.removeprefix("i").startswith(kind)), None)


def sent_at_least(kind, given, result):
    """Return the bytes that this rank sends in a call; given: its arguments by name."""
    group = given.get("process_group")
    group = given.get("group_name", dist.group.WORLD) if group is None else group
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    rank, n = group.rank(), group.size()
    is_root = rank == given.get("root_rank", given.get("src"))
    if kind == "alltoall":
        sent = given.get("input_tensors", given.get("input"))
        splits = given.get("input_split_sizes")
        if isinstance(sent, (list, tuple)):
            return bytes_of(sent) - bytes_of(sent[rank])
        return bytes_of(sent) * (1 - (splits[rank] / max(sum(splits), 1) if splits else 1 / n))
    if kind == "gather":
        return 0 if is_root else bytes_of(given.get("input_tensors", given.get("input_tensor")))
    parts = {
        "allreduce": 2 * (n - 1) / n,
        "reducescatter": (n - 1) / n,
        "allgather": (n - 1) / n,
        "scatter": is_root * (n - 1) / n,
        "broadcast": is_root and n > 1,
        "reduce": not is_root,
        "send": 1,
    }
    return parts[kind] * max(bytes_of(one) for one in (*given.values(), result))


def bytes_of(given):
    return sum(one.nbytes for one in tree_leaves(given) if torch.is_tensor(one))


def bytes_kept(*but_not):
    """Return the bytes of all tensors that this process holds, those of but_not apart."""
    gc.collect()
    skip = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(but_not)}
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors()
    }
    return sum(size for pointer, size in storages.items() if pointer not in skip)


def tensors():
    """Return the tensors that this process holds; of a DTensor, what is in it."""
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    found += [one.grad for one in found if one.is_leaf and one.grad is not None]
    return [one for one in found if not is_traceable_wrapper_subclass(one)]


# ---- The command ----


def main(exercise):
    """Check the exercise on 2 and on 3 ranks; end with status 1 if it is not solved."""
    exercise = Path(exercise).resolve()
    args = parse_args()
    with ending_cleanly():
        if not solved(exercise, args):
            sys.exit(1)
    print(f"Solved. One way to write it, and why: exercises/solutions/{exercise.name}")
    told = ast.get_docstring(ast.parse(exercise.read_bytes())) or ""
    after = re.search(r"^Next: .*", told, re.MULTILINE)
    print(after[0] if after else "Next: python exercises/all.py")


def parse_args(watch=False):
    parser = argparse.ArgumentParser()
    parser.add_argument("--hint", action="store_true", help="say more, where it offers that")
    parser.add_argument("--solution", action="store_true", help="check the solution, not yours")
    if watch:
        parser.add_argument("--watch", action="store_true", help="check again when a file is saved")
    return parser.parse_args()


def solved(exercise, args):
    """Check it on 2 and on 3 ranks (or WORLD_SIZES), and print what comes out. Remember it."""
    importlib.import_module("torch._dynamo")  # of optimizers: else each rank loads it, for seconds

    before = hash_of(exercise)
    answer = SOLUTIONS / exercise.name if args.solution else None
    for world_size in WORLD_SIZES.get(exercise.name, (2, 3)):
        right, text = verdict(run(exercise, world_size, answer), args.hint)
        for line in f"{world_size} ranks: {text}".splitlines():
            print(
                textwrap.fill(line, 100, subsequent_indent=6 * " ", break_on_hyphens=False),
                flush=True,
            )
        if not right:
            return False
    if args.solution:
        return True
    if hash_of(exercise) != before:
        print("It was saved meanwhile. Once more:", flush=True)
        return solved(exercise, args)
    remember(exercise, before)
    return True


def remembered():
    """Return {name of an exercise: hash of what solved it}."""
    try:
        return json.loads(REMEMBERED.read_text())
    except (OSError, ValueError):
        return {}


def remember(exercise, its_hash):
    try:
        REMEMBERED.write_text(json.dumps(remembered() | {exercise.name: its_hash}))
    except OSError as error:  # a folder that is read-only: then it is checked again
        print(f"cannot remember that it is solved: {error}")


def hash_of(exercise):
    both = exercise.read_bytes() + (FOLDER / "checks" / exercise.name).read_bytes()
    return hashlib.sha256(both).hexdigest()


@contextlib.contextmanager
def ending_cleanly():
    """Let Ctrl-C, SIGTERM and SIGHUP end the ranks, too, without a traceback."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), leave)
    yield


def leave(number, _):
    ASKED_TO_END.append(number)
    if not FORKING:  # Python's own functions around a fork would swallow the exception
        sys.exit(128 + number)


@dataclass
class Report:
    """What one rank has to say.

    kind: right, empty, wrong, error, waits, works, killed, died, or nothing.
    """

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
        hints = [f"hint: {hint}" for hint in found.hints if hint]
        if hints[1:] and not second_hint:
            hints[1:] = ["(--hint says more)"]
        return False, "\n    ".join([text, *hints])
    ends = {"right": "has come to the end", "nothing": "gives no answer"}
    lines = [f"rank {one.rank} {ends.get(one.kind, one.text)}" for one in reports]
    hint = "a call waits until all others make the same call, with tensors of the same size"
    if re.search(r"send|recv|wait\(", " ".join(lines)):
        hint = (
            f"{hint}; a send waits for the recv that belongs to it; what isend or irecv has"
            " returned needs a wait()"
        )
    if "works" in by_kind:
        hint = "that line takes long, or never ends: no other rank is to blame"
    return False, "\n    ".join(
        [f"not yet. After {limit():.0f} s, there is no end:", *lines, f"hint: {hint}"]
    )


# ---- The processes ----


def limit():
    """Return LIMIT, or more on a machine that has other work."""
    load = os.getloadavg()[0] / os.cpu_count() if hasattr(os, "getloadavg") else 1
    return LIMIT * min(5, max(1, load))


def run(exercise, world_size, answer=None, context=CONTEXT):
    """Run the trial on so many processes; return a Report for each rank.

    answer: a file whose functions take the place of those in the exercise.
    """
    with tempfile.TemporaryDirectory() as folder:
        for life in range(10):
            reports = run_once(exercise, world_size, answer, context, life, folder)
            if all(report.kind != "killed" for report in reports):
                break
    return reports


def run_once(exercise, world_size, answer, context, life, folder):
    ends, workers, seconds = {}, [], limit()
    reports = [Report(rank) for rank in range(world_size)]
    try:
        FORKING.append(True)
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            workers.append(
                context.Process(
                    target=worker,
                    args=(exercise, answer, rank, world_size, life, folder, theirs, seconds),
                )
            )
            workers[-1].start()
            theirs.close()  # so that we see when the process has ended
            ends[ours] = rank
        FORKING.clear()
        if ASKED_TO_END:
            sys.exit(128 + ASKED_TO_END[0])
        deadline = time.monotonic() + seconds + 60  # a process that has not even begun by then
        while ends and (ready := wait(list(ends), max(0, deadline - time.monotonic()))):
            for end in ready:
                rank = ends.pop(end)
                try:
                    reports[rank] = Report(rank, *end.recv())
                except EOFError:
                    workers[rank].join(5)
                    reports[rank] = Report(rank, *how_it_ended(workers[rank].exitcode))
                if reports[rank].kind != "right":  # others may only fail because of this one
                    deadline = min(deadline, time.monotonic() + seconds / LIMIT)
    finally:
        FORKING.clear()
        for process in workers:
            if process.pid:
                end_group(process.pid)
                process.kill()
                process.join()
    return reports


def end_group(leader):
    """End a rank, and what it has started. Each rank is the leader of its session."""
    with contextlib.suppress(AttributeError, ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def how_it_ended(status):
    if status == -signal.SIGKILL:
        return "killed", "the process was killed"
    hints = [
        "do all ranks exchange tensors of the same size and dtype, in the same order?",
        "a set, for one, has another order in each process",
    ]
    return "died", f"the process has ended, with status {status}", hints if status < 0 else []


def worker(exercise, answer, rank, world_size, life, folder, answers, seconds):
    """One rank: run the trial, and send (kind, text, hints)."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr = out = Prefixed(f"[rank {rank}/{world_size}] ")
    sys.breakpointhook = lambda *_, **__: print(
        "breakpoint() has no terminal in a rank: print() what you want to see"
    )
    warnings.simplefilter("ignore", FutureWarning)  # of new names for calls that still work
    torch.set_num_threads(1)
    gc.freeze()  # bytes_kept then looks only through what comes from now on
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))
    own, saying, thread = str(answer or exercise), threading.Lock(), threading.main_thread()
    pid = os.getpid()

    def say(*what):
        if os.getpid() == pid and saying.acquire(blocking=False):  # once, and no child for it
            out.finish()
            answers.send(what)

    def give_up():
        busy, frames = cpu_seconds(thread), stack_of(thread)
        time.sleep(0.5)
        busy = cpu_seconds(thread) - busy > 0.02
        where = [one for one in frames if one.filename == own and one.name != "<module>"]
        if not where:  # it waits for the others in the check
            return say("waits", "has come to the end of what you wrote")
        line = f"line {where[-1].lineno}{CASE[0] and f', {CASE[0]}'}: {where[-1].line}"
        inside = Path(frames[-1].filename)
        asleep = inside == Path(__file__) and frames[-1].name == "sleep"
        locked = inside.name in ("threading.py", "queue.py", "subprocess.py")
        if busy or asleep or locked:
            say("works", f"{'computes' if busy else 'sleeps' if asleep else 'stands'} in {line}")
        else:
            say("waits", f"waits in {line}")

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    try:
        check = load(exercise, answer, rank)
        dist.init_process_group(
            "gloo",
            f"file://{folder}/meet-{life}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=seconds + 60),
        )
        timer.start()
        asked = inspect.signature(check["trial"]).parameters
        given = {"life": life, "folder": Path(folder)}
        figures = check["trial"](**{name: given[name] for name in asked})
    except NotYet as error:
        wrong, *hints = error.args
        say("wrong", wrong, hints)
    except (Exception, SystemExit) as error:
        code = list(traceback.walk_tb(error.__traceback__))[-1][0].f_code
        if isinstance(error, NotImplementedError) and code.co_filename == own:
            task = (code.co_consts[0] or "").partition("\n")[0]
            where = f"{code.co_name}, line {code.co_firstlineno},"
            read = re.search(r"\n(Read before(?:.+\n)*)", sys.modules["answer"].__doc__)
            say(
                "empty",
                f"{where} is still empty. To do:\n    {task}",
                [" ".join(read[1].split()) if read else ""],
            )
        else:
            say(
                "error",
                describe(error, own),
                [hint for words, hint in HINTS.items() if re.search(words, str(error))],
            )
    else:
        timer.cancel()
        say("right", figures or "")
    threading.Event().wait()  # for the end from outside: others may still wait for this rank


def end_with_parent():
    """End this process when the one that checks has ended, however that was."""
    multiprocessing.parent_process().join()
    end_group(os.getpid())
    os._exit(1)


def cpu_seconds(thread):
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def stack_of(thread):
    return traceback.extract_stack(sys._current_frames()[thread.ident])


def sleep(seconds, sleep=time.sleep):
    sleep(seconds)  # has a frame of its own, so that a rank that sleeps is told from one that waits


def die():
    """End this rank at once, as a machine that fails does."""
    os.kill(os.getpid(), signal.SIGKILL)


def load(exercise, answer=None, rank=0):
    """Make the module answer: the exercise, with what the file answer has in place of its own.
    Return the names of the check, which are others."""
    exercise, time.sleep = Path(exercise), sleep
    module = sys.modules["answer"] = types.ModuleType("answer")
    if rank % 2:
        module.set, module.frozenset = Turned, Frozen
    for path in [exercise] + [answer] * bool(answer):
        execute(path, vars(module))
    check = {"__name__": "check"}
    execute(FOLDER / "checks" / exercise.name, check)
    return check


def execute(path, names):
    tree = ast.parse(Path(path).read_bytes(), str(path))  # bytes: in whatever encoding
    tree = ast.fix_missing_locations(Sets().visit(tree))
    exec(compile(tree, str(path), "exec"), names)  # noqa: S102


class Turned(set):
    """A set in another order: each process has its own, but for those that are forked, as here."""

    def __iter__(self):
        return iter([*super(type(self), self).__iter__()][::-1])


class Frozen(frozenset):
    __iter__ = Turned.__iter__


class Sets(ast.NodeTransformer):
    """Let {...} and {... for ...} call set()."""

    def visit_Set(self, node):
        self.generic_visit(node)
        items = (
            ast.List(node.elts, ast.Load())
            if isinstance(node, ast.Set)
            else ast.ListComp(node.elt, node.generators)
        )
        return ast.copy_location(ast.Call(ast.Name("set", ast.Load()), [items], []), node)

    visit_SetComp = visit_Set


def describe(error, own):
    """Say what an exception is, with the learner's lines of the traceback alone."""
    lines = [f"{CASE[0]}{', ' * bool(CASE[0])}an exception:"]
    if isinstance(error, SyntaxError) and error.filename == own:
        lines += [
            f"{Path(own).name}, line {error.lineno}: {(error.text or '').strip()}",
            f"{type(error).__name__}: {error.msg}",
        ]
        return "\n    ".join(lines)
    stack = traceback.extract_tb(error.__traceback__)
    for frame in [frame for frame in stack if frame.filename == own] or stack[-1:]:
        line = linecache.getline(frame.filename, frame.lineno).strip()
        lines.append(f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {line}")
    return "\n    ".join([*dict.fromkeys(lines), f"{type(error).__name__}: {error}"])


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

    def finish(self):
        """Write what no newline has ended."""
        if self.rest:
            self.write("\n")
