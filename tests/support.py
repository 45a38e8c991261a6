"""Two ways to run a script of this collection: as a reader does, and fast.

run: any command, with a look at what it leaves behind.
fork, fork_ranks: the script in fresh processes, forked from a server that has torch loaded, so that
a run costs a tenth of a second. fork_ranks plays torchrun: its environment, one store for all
attempts, another attempt when a rank has failed. These processes skip the end of the interpreter:
what goes wrong there shows with run alone.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = sys.executable
# The environment of a shell in which the .venv is active.
ACTIVE = {"PATH": f"{os.path.dirname(PYTHON)}:{os.environ['PATH']}"}
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]

forkserver = multiprocessing.get_context("forkserver")
# Starting a process also asks whether others have ended, even those of other threads. When two
# threads ask at the same moment, one of them finds the exit code gone, and reports 255.
asking = threading.Lock()
# All that the scripts and the tests' own modules import: else each process imports it anew.
forkserver.set_forkserver_preload([
    "torch", "torch._dynamo", "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.pipelining", "torchvision.datasets", "pytest", "support",
])  # fmt: skip


def limit_file_size():
    """Called in a child: files may grow to 20 KB, which stands in for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def pretend_one_gpu():
    """Called in a child: torch says that there is one GPU."""
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1


def machine():
    """The number of the machine that this forked process plays: 1, 2, ..."""
    return int(os.environ["GROUP_RANK"]) + 1


def play_machine():
    """Called in a child: a host name of its own, and an address that the others can reach."""
    name = f"node{machine()}"
    socket.gethostname = lambda: name
    addresses = {"node1": "10.0.0.1", "node2": "10.0.0.2"}
    socket.gethostbyname = lambda name: addresses.get(name, name)
    look_up = socket.getaddrinfo
    socket.getaddrinfo = lambda name, *args: look_up(addresses.get(name, name), *args)


def clocks_differ():
    """Called in a child: the clock of the second machine is a thousand seconds fast."""
    fast, now = 1000 * (machine() - 1), time.time
    time.time = lambda: now() + fast
    os.sched_getaffinity = lambda _: {0}  # else both machines' threads want all cores of this one


def one_core():
    """Called in a child: one thread. With more, the last bits depend on how many there are."""
    os.sched_getaffinity = lambda _: {0}


def record_draws():
    """Called in a child: every DistributedSampler prints the items that it draws."""
    draw = DistributedSampler.__iter__

    def draw_and_print(sampler):
        items = list(draw(sampler))
        print(f"drawn {sampler.rank} {sampler.epoch} {items}\n", end="", flush=True)
        return iter(items)

    DistributedSampler.__iter__ = draw_and_print


def variant(folder, script, changes):
    """Write ROOT/script to folder with {old text: new text} replaced; return its path.

    Each old text must stand in the script exactly once: else a test would change nothing, or more
    than it means to.
    """
    text = (ROOT / script).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{text.count(old)} times in {script}: {old!r}"
        text = text.replace(old, new)
    path = folder / pathlib.Path(script).name
    path.write_text(text)
    return path


def load(folder):
    """The snapshot in a folder."""
    return torch.load(folder / "snapshot.pt", weights_only=True)


def tensors(tree):
    """All tensors in a snapshot, in order."""
    if isinstance(tree, dict):
        return list(itertools.chain(*(tensors(value) for value in tree.values())))
    return [tree] if isinstance(tree, torch.Tensor) else []


def difference(one, other):
    """The largest |difference| between two snapshots' tensors, the optimizer's included."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) == 12  # six parameters, each with its momentum
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def digest(result):
    """The checksum of the weights with which a run ended, as it printed it."""
    return re.search(r"sha256 (\w{12})$", result.output, re.MULTILINE)[1]


def wait_until(condition, what, timeout=90, pause=0.05):
    """Wait until condition() is true, and return it; what: what is waited for, or says so."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout} s: {what() if callable(what) else what}")
        time.sleep(pause)
    return found


@contextlib.contextmanager
def free_port():
    """A port that nobody else gets while the "with" lasts, and on which a store can listen.

    The socket that holds it does not listen, and both sides say SO_REUSEADDR (libuv, which makes
    the store's socket, does): so the system gives the port to nobody who asks for any free one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def listening(pid):
    """The IPv4 and IPv6 addresses at which a process accepts connections: [(address, port)]."""
    sockets = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = []
    for table, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:  # LISTEN
                address, port = local.split(":")
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                name = socket.inet_ntop(kind, struct.pack(f"={len(words)}I", *words))
                found.append((name, int(port, 16)))
    return found


def files(folder):
    """The names of what a run has left in folder, locks apart, in order."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


def idx(tensor):
    """A uint8 tensor in the IDX format of the MNIST files: magic, sizes, big-endian, then bytes."""
    header = struct.pack(f">{1 + tensor.dim()}i", 0x0800 + tensor.dim(), *tensor.shape)
    return header + tensor.to(torch.uint8).numpy().tobytes()


def make_digits():
    """{file name: content} of a small set in MNIST's layout: 1,024 + 256 images, easy to learn."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(0, 200, (10, 28, 28), generator=generator)
    files = {}
    for split, count in (("train", 1024), ("t10k", 256)):
        labels = torch.randint(10, (count,), generator=generator)
        images = patterns[labels] + torch.randint(0, 56, (count, 28, 28), generator=generator)
        files[f"{split}-images-idx3-ubyte"] = idx(images)
        files[f"{split}-labels-idx1-ubyte"] = idx(labels)
    return files


def write_digits(root):
    """Write the small set below root, for --data-dir; return root."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, data in make_digits().items():
        (raw / name).write_bytes(data)
    return root


@dataclass
class Result:
    """What a run printed, stdout and stderr together, and how it ended."""

    output: str
    status: int  # of the command; of the first process that failed, where there are ranks
    attempts: int = 1

    def lines(self, rank=None):
        """The lines of the script, without "[rank r/W] "; those of one rank if it is given."""
        found = re.findall(r"^\[rank (\d+)/\d+\] (.*)$", self.output, re.MULTILINE)
        return [text for r, text in found if rank is None or int(r) == rank]

    def epochs(self):
        """{epoch: (loss, accuracy)} as rank 0 reported them, the last report of an epoch."""
        pattern = r"epoch +(\d+)/\d+ \| loss ([\d.]+) \| accuracy ([\d.]+) \| +\d+ images/s( \||$)"
        found = [re.match(pattern, line) for line in self.lines(0)]
        return {int(m[1]): (float(m[2]), float(m[3])) for m in found if m}

    def saved(self):
        """The epochs after which rank 0 reported that it had saved, in order."""
        found = [re.match(r"epoch +(\d+)/.* \| saved in \S+$", line) for line in self.lines(0)]
        return [int(m[1]) for m in found if m]

    def draws(self):
        """{(rank, epoch): the items drawn}, after record_draws."""
        found = re.findall(r"^drawn (\d+) (\d+) (\[.*\])$", self.output, re.MULTILINE)
        return {(int(rank), int(epoch)): json.loads(items) for rank, epoch, items in found}

    def error(self):
        """The one line "SCRIPT: error: ...", without what torchrun has to add; fails if not one."""
        found = [line for line in self.output.splitlines() if re.match(r"\w+\.py: error: ", line)]
        assert len(found) == 1, self.output
        return found[0].partition("error: ")[2]


def run(*command, cwd, timeout=120, env=None):
    """Run a command to its end; nothing that it started may be left behind."""
    process = start(*command, cwd=cwd, env=env)
    try:
        output, _ = process.communicate(timeout=timeout)
        assert_nothing_left(process)
        return Result(output, process.returncode)
    finally:
        end(process)


def start(*command, cwd, env=None):
    """Start a command; return its Popen, with all output in one pipe and a mark to find it by.

    env: what is added to the environment; a variable that is None is taken out of it.
    """
    # A variable of its own in the environment, which every descendant inherits: torchrun gives its
    # workers sessions of their own, so neither session nor process group would find them.
    mark = f"STARTED_BY_TEST={uuid.uuid4().hex}"
    env = {**os.environ, **(env or {}), **dict([mark.split("=")])}
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in env.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    process.mark = mark
    return process


def read_until(process, pattern, timeout=90):
    """Read what a process prints, up to the first line that matches; return all of it."""
    too_long = threading.Event()

    def give_up():
        too_long.set()
        end(process)  # so that the loop below comes to an end

    timer, output = threading.Timer(timeout, give_up), ""
    timer.start()
    try:
        for line in process.stdout:
            output += line
            if re.search(pattern, line):
                return output
    finally:
        timer.cancel()
    how = f"was ended after {timeout} s," if too_long.is_set() else "ended"
    raise AssertionError(f"the process {how} without {pattern!r}:\n{output}")


def family(process, itself=False):
    """The living processes that the command started, {pid: command line}; or all, with itself."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it has just ended
        if process.mark.encode() in environment and (itself or int(folder.name) != process.pid):
            found[int(folder.name)] = command
    return found


def assert_nothing_left(process, patience=10):
    """Fails if something that the command started outlives it by more than some seconds."""
    deadline = time.monotonic() + patience
    while left := family(process):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def end(process):
    """Kill what is left of a command and of all that it started, by process ids."""
    for pid in family(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def run_script(script, arguments, environment, folder, output, before=None, worker=None):
    """In a forked process: call before, one function or several, then run the script."""
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # What the script starts (a DataLoader's workers, say) starts as it does in a plain process. A
    # forkserver's child would start a server of its own, which imports torch anew.
    multiprocessing.set_start_method(None, force=True)
    if "RANK" in environment:
        torch.set_num_threads(1)  # torchrun sees to that by OMP_NUM_THREADS
    if sys.version_info < (3, 11, 10):  # a fork beside Gloo's threads may hang: pitfalls/README.md
        os.register_at_fork(before=lambda: time.sleep(0.01))  # by then, these have ended
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *map(str, arguments)]
    try:
        for function in before if isinstance(before, tuple) else [before] * (before is not None):
            function()
        if worker is None:
            runpy.run_path(str(script), run_name="__main__")
        else:  # call the script's function of that name instead, as mp.spawn does
            runpy.run_path(str(script))["worker"](*worker)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def fork(script, *arguments, cwd, timeout=60, before=None, env=None):
    """Run ROOT/script in one process forked from the server."""
    return _fork(script, arguments, [env or {}], cwd, timeout, before)


def fork_each(script, *arguments, cwd, environments, timeout=60):
    """Run ROOT/script in one forked process for each of the environments."""
    return _fork(script, arguments, environments, cwd, timeout, None)


def fork_workers(script, cwd, world_size=2, timeout=60, before=None, **args):
    """Call worker(rank, world_size, meeting_point, args) in forked processes, like mp.spawn."""
    args = argparse.Namespace(**args)
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/meet"
        workers = [(rank, world_size, meeting_point, args) for rank in range(world_size)]
        return _fork(script, [], [{}] * world_size, cwd, timeout, before, workers)


def fork_ranks(
    script, *arguments, cwd, world_size=2, nodes=1, max_restarts=0, timeout=120, before=None
):
    """Run ROOT/script in world_size forked processes, as torchrun would on that many nodes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    output, status, local = "", None, world_size // nodes
    for attempt in range(max_restarts + 1):
        environments = [
            {
                "RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local),
                "GROUP_RANK": str(rank // local), "GROUP_WORLD_SIZE": str(nodes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": "3",
            }
            for rank in range(world_size)
        ]  # fmt: skip
        result = _fork(script, arguments, environments, cwd, timeout, before)
        output, status = output + result.output, result.status
        if status == 0:
            break
    return Result(output, status, attempts=attempt + 1)


def numbers(pattern, result):
    """The groups of each line of rank 0 that matches as a whole."""
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return [match.groups() for match in found if match]


def assert_fails(folder, script, changes, message, world_size=2):
    """The script ends with this RuntimeError of its own when it is changed like this."""
    script = variant(folder, script, changes)
    result = fork_ranks(script, cwd=folder, world_size=world_size)
    assert result.status == 1, result.output
    assert f"RuntimeError: {message}" in result.output, result.output


def _fork(script, arguments, environments, cwd, timeout, before, workers=None):
    """One process for each of the environments; when one fails, the others get SIGTERM."""
    script = pathlib.Path(script) if pathlib.Path(script).is_absolute() else ROOT / script
    with tempfile.NamedTemporaryFile() as output:
        processes = [
            forkserver.Process(
                target=run_script,
                args=(script, arguments, env, str(cwd), output.name, before, worker),
            )
            for env, worker in zip(environments, workers or [None] * len(environments), strict=True)
        ]
        for process in processes:
            with asking:
                process.start()
        deadline = time.monotonic() + timeout
        try:
            while True:
                with asking:
                    alive = [process.sentinel for process in processes if process.is_alive()]
                    status = next((p.exitcode for p in processes if p.exitcode), 0)
                if status or not alive:
                    break
                assert wait(alive, max(0, deadline - time.monotonic())), (
                    f"no end after {timeout} s:\n{pathlib.Path(output.name).read_text()}"
                )
        finally:
            for process in processes:
                process.terminate()
                process.join(10)
                process.kill()
                process.join()
        return Result(pathlib.Path(output.name).read_text(), status)
