"""What the recipes and pytest -m gpu show. Both need packages that a bare machine lacks."""

import concurrent.futures
import importlib.util
import pathlib
import re
from dataclasses import dataclass

from started import PYTHON, ROOT, TORCHRUN

from one_gpu.check import Skipped, check
from one_gpu.printed import last_line
from one_gpu.shell import NOT_DONE


@dataclass(frozen=True)
class Pasted:
    """A recipe's answer, pasted into its program."""

    recipe: str  # its name
    ranks: int  # on how many it runs: one by NCCL, several, which share the GPU, by Gloo


@check(200)
def recipes(shell):
    """The answer of each recipe, pasted into the program of tests/pasted (some of these need two
    ranks, or a CPU)."""
    needs("pytest")
    from test_recipes_pasted import RECIPES

    if shell.pretend:
        programs = [Pasted("accumulate", 1), Pasted("stream", 1)]
    else:
        programs = [Pasted(recipe, ranks) for ranks in (1, 2) for recipe in RECIPES]
    with concurrent.futures.ThreadPoolExecutor(2 if shell.pretend else 8) as pool:
        results = pool.map(lambda program: run_both_ways(shell, program), programs)
        said = dict(zip(programs, results, strict=True))
    found = {}
    for ranks, title in ((1, "one rank, NCCL"), (2, "two ranks, Gloo")):
        these = {program.recipe: said[program] for program in programs if program.ranks == ranks}
        held = [recipe for recipe, result in these.items() if result == "ok"]
        others = [f"{recipe}: {result}" for recipe, result in these.items() if result != "ok"]
        found[title] = f"{len(held)} of {len(RECIPES)} held: {', '.join(held)}"
        found[f"{title}: the others"] = others
    return found


def run_both_ways(shell, program):
    """Run a program one way, and if that fails the other way; return "ok", or what both said."""
    said = []
    for way in ("moved", "made"):
        result = run_pasted(shell, program, way)
        if result == "ok":
            return "ok"
        said.append(result)
    return " | ".join(dict.fromkeys(said))


def run_pasted(shell, program, way):
    """Run a program; return "ok", or the line that says what went wrong. way: see on_a_gpu()."""
    from test_recipes_pasted import pasted

    path = pathlib.Path(shell.folder, f"{program.recipe}_{program.ranks}_{way}.py")
    path.write_text(for_this_machine(pasted(program.recipe), program.ranks, way, shell.pretend))
    folder = path.with_suffix("")
    folder.mkdir()
    ranks = f"--nproc-per-node={program.ranks}"
    output = shell.run(*TORCHRUN, "--standalone", ranks, path, cwd=folder, status=None)
    if NOT_DONE in output:
        return NOT_DONE
    return "ok" if output.count("done on rank") == program.ranks else last_line(output)


def for_this_machine(program, ranks, way, pretend):
    """A pasted program for one GPU, or for the CPU, with a process group also on one rank."""
    if pretend:
        return on_device(program, "cpu", "gloo")
    program = on_device(program, "cuda", f"cpu:gloo,cuda:{'nccl' if ranks == 1 else 'gloo'}")
    return on_a_gpu(program, way)


def on_device(program, device, backend):
    """A pasted program with another device and backend than a CPU's."""
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
    return program


def on_a_gpu(program, way):
    """A pasted program whose tensors are on the GPU.

    way: "moved" moves the models and the batches there; "made" makes all tensors there.
    """
    if way == "made":
        first = "rank, world_size = int("
        return program.replace(first, f'torch.set_default_device("cuda:0")\n{first}')
    program = program.replace("torch.randn(2, 24, 8)", 'torch.randn(2, 24, 8).to("cuda")')
    blocks = "nn.Sequential(Block(width), Block(width))"
    move = "self.to(self.first.weight.device if self.first.weight.is_meta else 'cuda')"
    return program.replace(blocks, f"{blocks}\n        {move}")


@check(200)
def tests(shell):
    """pytest -m gpu, as far as one GPU goes. It writes docs/transcripts/gpu.json."""
    needs("pytest", "xdist")
    options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-n", "0")
    output = shell.run(PYTHON, "-m", "pytest", *options, ROOT / "tests", status=None, cwd=ROOT)
    lines = [line for line in output.splitlines() if re.match(r"(FAILED|SKIPPED|ERROR)\b", line)]
    return {"result": last_line(output), "lines": lines}


def needs(*packages):
    """Raises Skipped if one of these packages is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"needs {package}")
