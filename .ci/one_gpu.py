"""Run the checks of .ci/gpu, in the order of their worth; or write what they found into the pages.

    python .ci/one_gpu.py FOLDER [--pretend] [--seconds 440] [--only NAME ...] [--list]
    .ci/gpu FOLDER --write

Each check is a function below, with a limit in seconds. Its commands run in folders of their own,
several checks at once while nothing is timed; those that measure time run alone, one by one. A
check returns its figures. It fails by an AssertionError, or if a command does not end in time.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from started import PYTHON, TORCHRUN, end, read_until, start

INSIDE = ROOT / ".ci" / "inside_gpu.py"
ONE, ELASTIC, MULTINODE, COLLECTIVES, _, PARALLEL, *_ = sorted(
    path.name for path in ROOT.glob("0*_*.py")
)
TEMPLATE, TOOL = "template/train.py", ROOT / "tools" / "check_training.py"
PAGE = ROOT / "tests" / "README.md"
KEPT = ROOT / "docs" / "transcripts" / "one_gpu.json"
BLOCK = re.compile(
    r"(?<=<!-- written by: .ci/gpu FOLDER --write -->\n).*?(?=<!-- end -->)", re.DOTALL
)
STEPS = {}  # {name: (function, seconds it may take, whether it runs alone)}


class Skipped(Exception):
    """Why a check cannot run here."""


def step(limit, alone=False):
    """Make a function a check: it takes a Shell and returns figures, {name: number or text}."""

    def register(function):
        name = function.__name__.replace("_", "-")
        STEPS[name] = function, limit, alone
        return function

    return register


class Shell:
    """Runs the commands of one check, until its time is up."""

    def __init__(self, log, deadline, pretend, folder):
        self.log, self.deadline, self.pretend, self.results = log, deadline, pretend, folder
        self.folder = tempfile.mkdtemp(prefix="one_gpu_")
        self.environment = {
            "CUDA_VISIBLE_DEVICES": ""
            if pretend
            else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            "KINETO_LOG_LEVEL": "6",
            "MPLBACKEND": "Agg",
        }

    def __call__(self, *command, status=0, cwd=None, env=None):
        """Run a command; return what it printed. status: what it must end with, None: anything."""
        process = start(*command, cwd=cwd or self.folder, env=self.environment | (env or {}))
        output = ""
        try:
            output, _ = process.communicate(timeout=max(1, self.deadline - time.monotonic()))
            output = output.replace("\r", "")  # of what a tool ran in a terminal of its own
        except subprocess.TimeoutExpired as error:
            output = (error.output or b"").decode(errors="replace")
            if status is None:
                return f"{output}\nnot done in time"
            raise AssertionError("not done in time") from None
        finally:
            end(process)
            self.note(command, output, process.returncode)
        assert status in (None, process.returncode), f"status {process.returncode}: {last(output)}"
        return output

    def note(self, command, output, status):
        words = " ".join(map(str, command))
        self.log(f"\n$ {words}\n{output}\n[status {status}]\n")

    def torchrun(self, script, *arguments, ranks=1, restarts=0, **options):
        return self(
            *TORCHRUN,
            "--standalone",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}",
            *script_words(script),
            *arguments,
            **options,
        )

    def inside(self, name, *arguments, ranks=1):
        """Run a function of inside_gpu.py under torchrun; return the figures that it prints."""
        output = self.torchrun(INSIDE, name, *arguments, ranks=ranks)
        return json.loads(re.findall(r"^FIGURES (.*)$", output, re.MULTILINE)[-1])


def script_words(script):
    """A script of the repository, or (settings, script): run with those of inside_gpu.py."""
    if isinstance(script, tuple):
        settings, script = script
        return INSIDE, "run", settings, ROOT / script
    return [ROOT / script]


def last(output):
    """The last line that names an error, or the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.search(r"\w(Error|Exception)\b.*: ", line) and "ChildFailedError" not in line
    ]
    return (errors or lines or ["nothing printed"])[-1][-300:]


def warnings_in(output):
    """The lines that warn, without torchrun's note about threads."""
    return sorted(
        {
            line
            for line in output.splitlines()
            if re.search("warn|deprecat", line, re.IGNORECASE) and "OMP_NUM" not in line
        }
    )


def digest(output):
    return re.findall(r"identical, sha256 (\w+)$", output, re.MULTILINE)[-1]


def accuracy(output):
    return float(re.findall(r"accuracy ([\d.]+)", output)[-1])


# ---- What the scripts do ----


@step(60)
def lesson_01(shell):
    """01 trains on one GPU, and its proof holds."""
    output = shell(PYTHON, ROOT / ONE, 3, 1)
    off = float(re.search(r"leaves on each rank: .* by (\S+)$", output, re.MULTILINE)[1])
    assert off < 1e-5 and accuracy(output) > 0.95
    return {"accuracy": accuracy(output), "gradient off by": off, "warnings": warnings_in(output)}


def equal_bits(shell, run, again=True):
    """{setting: figures} of run(settings, kill), which returns what a training leaves: each twice
    undisturbed and once killed, with torch's defaults and with the deterministic settings."""
    found = {}
    for settings in ("deterministic",) if shell.pretend else ("deterministic", "defaults"):
        once = run(settings, False)
        found[f"{settings}: a killed run is equal"] = once == run(settings, True)
        if again and not shell.pretend:
            found[f"{settings}: two runs are equal"] = once == run(settings, False)
    return found


@step(150)
def lesson_02(shell):
    """02 trains, crashes, and goes on; are the bits equal?"""
    seen = []

    def run(settings, kill):
        output = shell.torchrun(
            (settings, ELASTIC),
            4 if shell.pretend else 6,
            1,
            *["--crash-epoch", 3] * kill,
            restarts=3,
        )
        assert not kill or "resumed from snapshot.pt at epoch 3" in output
        os.unlink(f"{shell.folder}/snapshot.pt")
        seen.extend([] if kill else warnings_in(output))
        return digest(output)

    return equal_bits(shell, run) | {"warnings": sorted(set(seen))}


@step(120)
def template(shell):
    """The template trains, is killed in the middle, and goes on; are the bits equal?"""
    import torch

    seen = []

    def leaves(state):
        if isinstance(state, torch.Tensor):
            return [
                (
                    str(state.dtype),
                    tuple(state.shape),
                    state.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
                )
            ]
        if isinstance(state, dict):
            return [leaf for key in state for leaf in [key, *leaves(state[key])]]
        return (
            [leaf for item in state for leaf in leaves(item)]
            if isinstance(state, list | tuple)
            else [state]
        )

    def run(settings, kill):
        command = (
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node=1",
            "--max-restarts=3",
            *script_words((settings, TEMPLATE)),
            60,
            20,
        )
        process = start(*command, cwd=shell.folder, env=shell.environment)
        timer = threading.Timer(max(1, shell.deadline - time.monotonic()), end, [process])
        timer.start()
        try:
            output = ""
            if kill:
                output = read_until(process, "step +30/60")
                for pid in children(process.pid):
                    os.kill(pid, signal.SIGKILL)
            output += process.communicate()[0]
        finally:
            timer.cancel()
            end(process)
        shell.note(command, output, process.returncode)
        assert process.returncode == 0, last(output)
        path = pathlib.Path(shell.folder, "train.pt")
        state = torch.load(path, map_location="cpu", weights_only=True)
        for left in path.parent.glob("train*"):
            left.unlink()
        seen.extend([] if kill else warnings_in(output))
        return leaves(state)

    return equal_bits(shell, run, again=False) | {"warnings": sorted(set(seen))}


def children(pid):
    return map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@step(120)
def lesson_02_with_ranks_that_share_a_gpu(shell):
    """02 with two and three ranks on one GPU, by Gloo: are the bits of a crashed run equal?"""
    if shell.pretend:
        raise Skipped("needs a GPU")
    found = {}
    for ranks in (2, 3):
        digests = []
        for crash in ([], ["--crash-epoch", 3]):
            output = shell.torchrun(
                ("gloo+deterministic", ELASTIC), 6, 1, *crash, ranks=ranks, restarts=3
            )
            os.unlink(f"{shell.folder}/snapshot.pt")
            digests.append(digest(output))
        found[f"deterministic, {ranks} ranks: a crashed run is equal"] = digests[0] == digests[1]
    return found


@step(60)
def lesson_03(shell):
    """03 trains on one machine with one rank."""
    output = shell.torchrun(MULTINODE, 3, 1)
    assert accuracy(output) > 0.95
    return {"accuracy": accuracy(output), "warnings": warnings_in(output)}


@step(60)
def two_ranks_are_refused(shell):
    """More ranks than GPUs: one line with the cure."""
    if shell.pretend:
        raise Skipped("needs a GPU")
    found = {}
    for script in (ONE, ELASTIC, MULTINODE, PARALLEL, TEMPLATE):
        if script == ONE:
            continue  # it starts a process for each GPU
        output = shell.torchrun(script, ranks=4 if script == PARALLEL else 2, status=None)
        lines = [line for line in output.splitlines() if "GPU" in line and "Error" not in line]
        found[script] = lines[0] if lines else last(output)
    return found


@step(60)
def nccl_refuses_two_ranks_on_a_gpu(shell):
    """Both ranks of 02 choose GPU 0: what NCCL prints, and whether the pitfalls' table has it."""
    if shell.pretend:
        raise Skipped("needs NCCL")
    output = shell.torchrun(("same-gpu", ELASTIC), 2, 1, ranks=2, status=None)
    found = [
        m
        for m in ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")
        if m in output
    ]
    assert found, last(output)
    table = (ROOT / "pitfalls/README.md").read_text()
    return {"printed": found[0], "in the table": found[0] in table}


@step(90)
def synchronisations(shell):
    """Which lines of 02 and the template make the CPU wait for the GPU, and how often."""
    if shell.pretend:
        raise Skipped("needs a GPU")
    found = {}
    for script, arguments in ((ELASTIC, (3, 1)), (TEMPLATE, (60, 20))):
        output = shell.torchrun(("syncs", script), *arguments)
        found[script] = json.loads(re.findall(r"^SYNCS (.*)$", output, re.MULTILINE)[-1])
    return found


# ---- What the pages say of torch on a GPU ----


@step(120)
def messages(shell):
    """What torch prints after some mistakes of the pitfalls' table."""
    return shell.inside("messages")


@step(90)
def sharded(shell):
    """FSDP2: three AdamW steps, bfloat16, the meta device, dcp's save, load and async_save."""
    return shell.inside("sharded")


@step(90)
def mixed_precision(shell):
    """DDP with float16 and a GradScaler, an inf, clipping."""
    return shell.inside("mixed_precision")


@step(120)
def compiled(shell):
    """compile() and activation checkpoints, the gradient and the memory."""
    return shell.inside("compiled")


@step(60)
def context_parallel(shell):
    """torch's own context_parallel, on one rank."""
    return shell.inside("torchs_context_parallel")


@step(60)
def experts(shell):
    """Tensors and DTensors in one optimizer, whose foreach is the default on a GPU."""
    return shell.inside("experts")


@step(60)
def gloo_with_two_ranks_on_a_gpu(shell):
    """Two ranks share GPU 0 by Gloo: DDP's gradient, and which collectives take CUDA tensors."""
    return shell.inside("gloo", ranks=2)


@step(60, alone=True)
def memory_of_a_process(shell):
    """MB of GPU memory that a process takes with one tensor, and after NCCL's first collective."""
    if shell.pretend:
        raise Skipped("needs a GPU")
    return shell.inside("memory_of_a_process")


@step(200)
def recipes(shell):
    """The answer of each recipe, pasted into the program of tests/pasted (some of these need two
    ranks, or a CPU)."""
    from test_recipes_pasted import RECIPES, pasted

    def run(name, ranks, way):
        path = pathlib.Path(shell.folder, f"{name}_{ranks}_{way}.py")
        path.write_text(on_a_gpu(pasted(name), ranks, way, shell.pretend))
        (folder := path.with_suffix("")).mkdir()
        output = shell(
            *TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", path, cwd=folder, status=None
        )
        if "not done in time" in output:
            return "not done in time"
        return "ok" if output.count("done on rank") == ranks else last(output)

    def both_ways(which):
        name, ranks = which
        said = []
        for way in ("moved", "made"):
            said.append(run(name, ranks, way))
            if said[-1] == "ok":
                return "ok"
        return " | ".join(dict.fromkeys(said))

    each = [(name, ranks) for ranks in (1, 2) for name in RECIPES]
    if shell.pretend:
        each = [("accumulate", 1), ("stream", 1)]
    with concurrent.futures.ThreadPoolExecutor(2 if shell.pretend else 8) as pool:
        said = dict(zip(each, pool.map(both_ways, each), strict=True))
    found = {}
    for ranks in (1, 2):
        held = [name for name, r in each if r == ranks and said[name, r] == "ok"]
        title = "one rank, NCCL" if ranks == 1 else "two ranks, Gloo"
        found[title] = f"{len(held)} of {len(RECIPES)} held: {', '.join(held)}"
        found[f"{title}: the others"] = [
            f"{name}: {said[name, r]}" for name, r in each if r == ranks and name not in held
        ]
    return found


def on_a_gpu(program, ranks, way, pretend):
    """A pasted program for a GPU. way: "moved" moves models and batches, "made" makes all there."""
    backend = "gloo" if pretend else "nccl" if ranks == 1 else "cpu:gloo,cuda:gloo"
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    device = "cpu" if pretend else "cuda"
    for old, new in (
        ('torch.device("cpu")', f'torch.device("{device}")'),
        ('mesh("cpu"', f'mesh("{device}"'),
        (
            'if world_size > 1:\n    dist.init_process_group("gloo"',
            f'if True:\n    dist.init_process_group("{backend}"',
        ),
        ('autocast("cpu"', f'autocast("{device}"'),
        ('GradScaler("cpu"', f'GradScaler("{device}"'),
    ):
        program = program.replace(old, new)
    first = "rank, world_size = int("
    if pretend:
        return program
    if way == "made":
        return program.replace(first, f'torch.set_default_device("cuda:0")\n{first}')
    program = program.replace("torch.randn(2, 24, 8)", 'torch.randn(2, 24, 8).to("cuda")')
    moved = (
        "nn.Sequential(Block(width), Block(width))\n        "
        "self.to(self.first.weight.device if self.first.weight.is_meta else 'cuda')"
    )
    return program.replace("nn.Sequential(Block(width), Block(width))", moved)


@step(200)
def tests(shell):
    """pytest -m gpu, as far as one GPU goes. It writes docs/transcripts/gpu.json."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        raise Skipped("pytest is not installed") from None
    output = shell(
        PYTHON,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        ROOT / "tests",
        status=None,
        cwd=ROOT,
    )
    lines = [line for line in output.splitlines() if re.match(r"(FAILED|SKIPPED|ERROR)\b", line)]
    return {"result": last(output), "lines": lines}


# ---- What takes time, one by one ----


@step(150, alone=True)
def throughput(shell):
    """benchmarks/throughput.py at batch sizes 512 and 4096."""
    size = (
        ["--rounds", 1, "--images", 512, "--batch-sizes", 64]
        if shell.pretend
        else ["--rounds", 5, "--images", 16_384, "--batch-sizes", 512, 4096]
    )
    output = shell(
        PYTHON,
        ROOT / "benchmarks/throughput.py",
        *size,
        "--workers",
        0,
        1,
        *[] if shell.pretend else [8],
        "--results-dir",
        shell.results,
    )
    return tables_of(output)


@step(60, alone=True)
def ddp_anatomy(shell):
    """benchmarks/ddp_anatomy.py."""
    size = ["--layers=4", "--width=256", "--batch-size=4", "--rounds=1"] if shell.pretend else []
    return tables_of(
        shell(PYTHON, ROOT / "benchmarks/ddp_anatomy.py", *size, "--results-dir", shell.results)
    )


@step(60, alone=True)
def recovery(shell):
    """benchmarks/recovery.py: how long a killed rank costs on this machine."""
    size = (
        ["--rounds", 1, "--megabytes", 0.1]
        if shell.pretend
        else ["--rounds", 2, "--megabytes", 100]
    )
    return tables_of(
        shell(PYTHON, ROOT / "benchmarks/recovery.py", *size, "--results-dir", shell.results)
    )


def trainings(shell, settings, checked):
    """Yield the name of 02 and the template, and what each prints, with the tool or without."""
    for script, arguments in ((ELASTIC, (8, 8)), (TEMPLATE, (200, 200))):
        words = [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node=1",
            *script_words(("plain" if shell.pretend else settings, script)),
            *arguments,
        ]
        if checked:
            words = [PYTHON, TOOL, "--seconds", 60, "--", *words]
        yield script, shell(*words, status=None)
        for left in pathlib.Path(shell.folder).glob("*.*"):
            left.unlink()


@step(90)
def check_training_waits(shell):
    """Which lines of 02 and the template make the CPU wait for the GPU under check_training."""
    if not TOOL.exists():
        raise Skipped("there is no tools/check_training.py")
    return {
        script: json.loads((re.findall(r"SYNCS (.*)$", output, re.MULTILINE) or ["{}"])[-1])
        for script, output in trainings(shell, "syncs", True)
    }


@step(90, alone=True)
def check_training(shell):
    """tools/check_training.py on 02 and the template: its words, and what it costs."""
    if not TOOL.exists():
        raise Skipped("there is no tools/check_training.py")
    found = {}
    for checked in (False, True):
        for script, output in trainings(shell, "plain", checked):
            name = f"{script}, {'checked' if checked else 'alone'}"
            speeds = re.findall(r"(\d+) (?:images|examples)/s", output)
            found[f"{name}: the last speeds"] = ", ".join(speeds[-4:])
            found[f"{name}: sha256"] = digest(output) if "identical" in output else "cut short"
            if checked:
                found[f"{script}: said"] = output.splitlines()[-8:]
    return found


def tables_of(output):
    """The tables of a benchmark, {title: {row: text}}, from the line of JSON that it prints."""
    result = json.loads(re.findall(r"^\{.*\}$", output, re.MULTILINE)[-1])
    return {
        table["title"]: {
            " ".join(str(cell) for cell in row if isinstance(cell, str)) or str(row[0]): [
                round(cell, 3) for cell in row if isinstance(cell, int | float)
            ]
            for row in table["rows"]
        }
        for table in result["tables"]
    }


# ---- Running them, and writing the pages ----


def machine(pretend):
    import torch

    about = {
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "gpu": None,
    }
    if not pretend:
        about |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return about


def run_all(folder, args):
    """Run the checks that are asked for; return {name: what came of it}."""
    report = {"machine": machine(args.pretend), "checks": {}}
    path = folder / "one_gpu.json"
    if args.only and path.exists():
        report["checks"] = json.loads(path.read_text())["checks"]
    stop = time.monotonic() + args.seconds
    lock = threading.Lock()

    def run(name):
        function, limit, alone = STEPS[name]
        begin = time.monotonic()
        printed = []
        limit = 600 if args.pretend else limit  # on few cores
        shell = Shell(printed.append, min(begin + limit, stop), args.pretend, folder)
        if not alone:  # several at once: each has a core
            shell.environment["OMP_NUM_THREADS"] = "1"
        if begin > stop - 5:
            entry = {"result": "not run: the time was up"}
        else:
            try:
                entry = {"result": "ok", "figures": function(shell)}
            except Skipped as reason:
                entry = {"result": f"skipped: {reason}"}
            except Exception as error:
                entry = {"result": f"failed: {error}"}
                printed.append(traceback.format_exc())
        shutil.rmtree(shell.folder, ignore_errors=True)
        entry["seconds"] = round(time.monotonic() - begin, 1)
        with lock, open(folder / "one_gpu.txt", "a") as file:
            file.write(f"\n======== {name}: {entry['result']}\n" + "".join(printed))
            report["checks"][name] = entry
            path.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{name:35} {entry['seconds']:6.1f} s  {entry['result'][:150]}", flush=True)

    names = [name for name in STEPS if not args.only or name in args.only]
    together = [name for name in names if not STEPS[name][2]]
    with concurrent.futures.ThreadPoolExecutor(1 if args.pretend else 7) as pool:
        list(pool.map(run, together))
    for name in names:
        if name not in together:
            run(name)
    return report["checks"]


def rows_of(report):
    """The lines of the page's table."""
    if not report["checks"]:
        yield "Not run."
        return
    about = report["machine"]
    yield (
        f"On one {about['gpu']} (CUDA {about['cuda']}, NCCL {about['nccl']}), with torch"
        f" {about['torch']}, Python {about['python']} and {about['cores']} cores:\n"
    )
    yield "| Check | Result | What was seen |"
    yield "|---|---|---|"
    for name, (function, *_) in STEPS.items():
        entry = report["checks"].get(name, {"result": "not run"})
        seen = "; ".join(
            f"{key}: {in_words(value)}"
            for key, value in entry.get("figures", {}).items()
            if value != []
        )
        what = " ".join(function.__doc__.split()).rstrip(".")
        result = ", ".join(entry[key] for key in ("result", "date") if key in entry)
        cells = (" ".join(cell.replace("|", "/").split()) for cell in (what, result, seen or "-"))
        yield f"| {' | '.join(cells)} |"


def in_words(value):
    """A figure, short enough for a table."""
    if isinstance(value, dict):
        first = ", ".join(f"{key} {in_words(each)}" for key, each in [*value.items()][:4])
        return f"{first}, and {len(value) - 4} more" if len(value) > 4 else first
    if isinstance(value, list):
        if len(value) >= 3 and all(isinstance(each, int | float) for each in value):
            return f"{value[0]} ({value[1]} to {value[2]})"  # a median, the least and the most
        return (
            f"{len(value)} lines in the report" if len(value) > 2 else " / ".join(map(str, value))
        )
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)[:200]


def write_pages(folders):
    """Keep the reports of these folders as one, and show it on tests/README.md.

    Where several have a check, the last that has run it counts.
    """
    whole = {"machine": {}, "checks": {}}
    for folder in folders:
        report = json.loads((folder / "one_gpu.json").read_text())
        if not report["machine"]["gpu"]:
            sys.exit(f"{folder}/one_gpu.json comes from a pretended GPU: not written")
        whole["machine"] = report["machine"]
        for name, entry in report["checks"].items():
            if "figures" in entry or "figures" not in whole["checks"].get(name, {}):
                whole["checks"][name] = {"date": report["machine"]["date"], **entry}
    KEPT.write_text(json.dumps(whole, indent=1) + "\n")
    lines = "\n".join(rows_of(whole))
    PAGE.write_text(BLOCK.sub(lambda _: f"\n{lines}\n\n", PAGE.read_text()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="+", help="for what they find")
    parser.add_argument("--pretend", action="store_true", help="on a CPU, at the smallest")
    parser.add_argument("--seconds", type=int, default=440, help="for all of them; default 440")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="NAME", help="these checks")
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--write", action="store_true", help="write the page from these folders")
    args = parser.parse_args()
    if args.write:
        return write_pages(args.folder)
    if args.list:
        for name, (function, limit, _) in STEPS.items():
            print(f"{name:35} {limit:4} s  {' '.join(function.__doc__.split())}")
        return None
    if not args.pretend:
        import torch

        if not torch.cuda.is_available():
            sys.exit("torch sees no GPU here: --pretend runs what a CPU can run")
    folder = args.folder[0].resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checks = run_all(folder, args)
    failed = [name for name, entry in checks.items() if entry["result"].startswith("failed")]
    print(
        f"{len(checks) - len(failed)} of {len(checks)} checks did not fail; {folder}"
        "/one_gpu.json has the figures",
        flush=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
