"""What the scripts do: 01 to 03, 06 and the template."""

import os
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from started import ROOT

from one_gpu.check import Skipped, check
from one_gpu.printed import accuracy, digest, last_line, synchronisations_in, warnings_in
from one_gpu.shell import torchrun_command

ONE, ELASTIC, MULTINODE, COLLECTIVES, STORE, PARALLEL = sorted(
    path.name for path in ROOT.glob("0*_*.py")
)
TEMPLATE = "template/train.py"


@check(60)
def lesson_01(shell):
    """01 trains on one GPU, and its proof holds."""
    output = shell.python(ONE, 3, 1)
    off = float(re.search(r"leaves on each rank: .* by (\S+)$", output, re.MULTILINE)[1])
    assert off < 1e-5, f"the gradient is off by {off}"
    assert accuracy(output) > 0.95, f"accuracy {accuracy(output)}"
    return {"accuracy": accuracy(output), "gradient off by": off, "warnings": warnings_in(output)}


@dataclass
class Trained:
    """A training that has ended."""

    result: object  # what it leaves, to be compared with ==
    output: str


def equal_bits(shell, train: Callable[[str, bool], Trained], twice):
    """Whether the results of trainings are equal; returns figures.

    train(settings, kill) trains once; settings: those of inside/run_script.py. With the
    deterministic settings, and then with torch's defaults, it trains undisturbed, and once it is
    killed. twice: it trains undisturbed a second time, as bits can differ without a kill, too.
    """
    found, warned = {}, set()
    for settings in ("deterministic",) if shell.pretend else ("deterministic", "defaults"):
        undisturbed = train(settings, False)
        warned.update(warnings_in(undisturbed.output))
        killed = train(settings, True)
        found[f"{settings}: a killed run is equal"] = undisturbed.result == killed.result
        if twice and not shell.pretend:
            again = train(settings, False)
            warned.update(warnings_in(again.output))
            found[f"{settings}: two runs are equal"] = undisturbed.result == again.result
    found["warnings"] = sorted(warned)
    return found


@check(150)
def lesson_02(shell):
    """02 trains, crashes, and goes on; are the bits equal?"""
    epochs = 4 if shell.pretend else 6

    def train(settings, kill):
        crash = ["--crash-epoch", 3] if kill else []
        output = shell.torchrun(ELASTIC, epochs, 1, *crash, restarts=3, settings=settings)
        if kill:
            assert "resumed from snapshot.pt at epoch 3" in output, "it did not resume"
        os.unlink(f"{shell.folder}/snapshot.pt")
        return Trained(digest(output), output)

    return equal_bits(shell, train, twice=True)


@check(120)
def template(shell):
    """The template trains, is killed in the middle, and goes on; are the bits equal?"""

    def train(settings, kill):
        command = torchrun_command(TEMPLATE, 60, 20, restarts=3, settings=settings)
        output = shell.kill_ranks_at("step +30/60", command) if kill else shell.run(*command)
        path = pathlib.Path(shell.folder, "train.pt")
        leaves = leaves_of_snapshot(path)
        for left in path.parent.glob("train*"):
            left.unlink()
        return Trained(leaves, output)

    return equal_bits(shell, train, twice=False)


def leaves_of_snapshot(path):
    """The keys and values of a snapshot in order, as a list; of a tensor its type, shape, bits."""
    import torch  # here, as --list and --write work without it

    def leaves(state):
        if isinstance(state, torch.Tensor):
            bits = state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return [(str(state.dtype), tuple(state.shape), bits)]
        if isinstance(state, dict):
            return [leaf for key in state for leaf in [key, *leaves(state[key])]]
        if isinstance(state, list | tuple):
            return [leaf for item in state for leaf in leaves(item)]
        return [state]

    return leaves(torch.load(path, map_location="cpu", weights_only=True))


@check(120)
def lesson_02_with_ranks_that_share_a_gpu(shell):
    """02 with two and three ranks on one GPU, by Gloo: are the bits of a crashed run equal?"""
    if shell.pretend:
        raise Skipped("needs a GPU")
    found = {}
    for ranks in (2, 3):
        digests = []
        for crash in ([], ["--crash-epoch", 3]):
            output = shell.torchrun(
                ELASTIC, 6, 1, *crash, ranks=ranks, restarts=3, settings="gloo+deterministic"
            )
            os.unlink(f"{shell.folder}/snapshot.pt")
            digests.append(digest(output))
        found[f"deterministic, {ranks} ranks: a crashed run is equal"] = digests[0] == digests[1]
    return found


@check(60)
def lesson_03(shell):
    """03 trains on one machine with one rank."""
    output = shell.torchrun(MULTINODE, 3, 1)
    assert accuracy(output) > 0.95, f"accuracy {accuracy(output)}"
    return {"accuracy": accuracy(output), "warnings": warnings_in(output)}


@check(60)
def two_ranks_are_refused(shell):
    """More ranks than GPUs: one line with the cure."""
    if shell.pretend:
        raise Skipped("needs a GPU")
    found = {}
    for script in (ELASTIC, MULTINODE, PARALLEL, TEMPLATE):  # 01 starts a process for each GPU
        output = shell.torchrun(script, ranks=4 if script == PARALLEL else 2, status=None)
        lines = [line for line in output.splitlines() if "GPU" in line and "Error" not in line]
        found[script] = lines[0] if lines else last_line(output)
    return found


@check(60)
def nccl_refuses_two_ranks_on_a_gpu(shell):
    """Both ranks of 02 choose GPU 0: what NCCL prints, and whether the pitfalls' table has it."""
    if shell.pretend:
        raise Skipped("needs NCCL")
    output = shell.torchrun(ELASTIC, 2, 1, ranks=2, settings="same-gpu", status=None)
    messages = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")
    found = [message for message in messages if message in output]
    assert found, last_line(output)
    table = (ROOT / "pitfalls/README.md").read_text()
    return {"printed": found[0], "in the table": found[0] in table}


@check(90)
def synchronisations(shell):
    """Which lines of 02 and the template make the CPU wait for the GPU, and how often."""
    if shell.pretend:
        raise Skipped("needs a GPU")
    found = {}
    for script, arguments in ((ELASTIC, (3, 1)), (TEMPLATE, (60, 20))):
        output = shell.torchrun(script, *arguments, settings="syncs")
        assert "SYNCS " in output, "nothing was counted"
        found[script] = synchronisations_in(output)
    return found
