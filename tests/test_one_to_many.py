"""The two loops of the front page's diff end with the same weights; each line of it is needed."""

import functools
import os
import re
import shutil

import pytest
import shown
import torch
import torch.distributed as dist
from conftest import VISIBLE, machine_with_gpus
from support import ACTIVE, PYTHON, ROOT, TORCHRUN, fork, fork_ranks, pretend_gpus, run, variant

ONE, MANY = "docs/one_process.py", "docs/many_processes.py"
DIFF = shown.block("from one process to many")
LINE = re.MULTILINE

SAMPLER = {
    "DataLoader, DistributedSampler,": "DataLoader, RandomSampler,",
    "DistributedSampler(dataset)": "RandomSampler(dataset, generator=torch.Generator())",
    "sampler.set_epoch(epoch)": "sampler.generator.manual_seed(epoch)",
}
REDUCE = re.search(r"^ +dist\.all_reduce.*\n", (ROOT / MANY).read_text(), LINE)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the loop before prints, and the weights with which it ends."""
    folder = tmp_path_factory.mktemp("plain")
    return ended(fork(ONE, cwd=folder, before=take_one_thread), folder)


def take_one_thread():
    """Called in a child: two threads would wait for each other, where other tests run."""
    torch.set_num_threads(1)


def ended(result, folder):
    """([loss of each epoch], weights) of a run; it prints a line for each epoch, and no other."""
    assert result.status == 0, result.output
    lines = result.output.splitlines()
    found = [re.fullmatch(r"epoch (\d): loss (\d+\.\d{4})", line) for line in lines]
    assert all(found) and [int(match[1]) for match in found] == [*range(5)], result.output
    weights = torch.load(folder / "model.pt", weights_only=True)
    return [float(match[2]) for match in found], weights


def apart(one, other):
    """(largest difference of the losses, of the weights) of two runs."""
    (losses, weights), (other_losses, other_weights) = one, other
    assert weights.keys() == other_weights.keys() and len(weights) == 4
    return (
        max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)),
        max((weights[name] - other_weights[name]).abs().max().item() for name in weights),
    )


def assert_same(one, other):
    losses, weights = apart(one, other)
    assert losses < 1.5e-4 and weights < 1e-5  # losses are printed with four digits


# ---- The two loops ----


@pytest.mark.parametrize(("sign", "script"), [("+", ONE), ("-", MANY)])
def test_the_diff_is_that_of_the_two_files(sign, script):
    lines = [line[1:] for line in DIFF.splitlines() if line[:1] != sign]
    assert lines == (ROOT / script).read_text().splitlines()


def test_the_loop_before_prints_what_the_page_says(plain):
    found = re.findall(r"`epoch ([04]): loss (\S+)`", shown.README.read_text())
    assert [round(plain[0][int(number)] - float(loss), 3) for number, loss in found] == [0, 0]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_loop_after_ends_with_the_same_weights(tmp_path, plain, world_size):
    assert_same(ended(fork_ranks(MANY, cwd=tmp_path, world_size=world_size), tmp_path), plain)
    assert sorted(os.listdir(tmp_path)) == ["model.pt"]


# ---- What happens without a line ----


@pytest.mark.parametrize("changes", [
    {"    model = DDP(model)\n": "", "model.module": "model"},
    SAMPLER,
    {"64 // dist.get_world_size()": "64"},
    {"        sampler.set_epoch(epoch)  # another order in each epoch\n": ""},
], ids=["DDP", "DistributedSampler", "a share of the batch", "set_epoch"])  # fmt: skip
def test_without_it_the_weights_differ(tmp_path, plain, changes):
    result = fork_ranks(variant(tmp_path, MANY, changes), cwd=tmp_path)
    _, weights = apart(ended(result, tmp_path), plain)
    assert weights > 1e-3


def test_without_three_other_lines(tmp_path, plain):
    """Each rank prints a loss of its own, and the plain model would not load what is saved."""
    changes = {"range(5)": "range(1)", REDUCE: "", "dist.get_rank() == 0": "True",
               "model.module": "model"}  # fmt: skip
    result = fork_ranks(variant(tmp_path, MANY, changes), cwd=tmp_path)
    losses = re.findall(r"epoch 0: loss (\d\.\d{4})", result.output)
    assert len(losses) == 2 and all(abs(float(loss) - plain[0][0]) > 1e-2 for loss in losses)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(weights) == [f"module.{name}" for name in plain[1]]


# ---- GPUs ----


def write_down(kind):
    """Called in a child: it says what it asks for; the process ends at its group."""
    asked = []
    pretend_gpus(2, kind)
    torch.accelerator.set_device_index = asked.append

    def init_process_group(backend):
        print(f"rank {os.environ['RANK']}: GPU {asked}, {backend}\n", end="", flush=True)
        os._exit(0)

    dist.init_process_group = init_process_group


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_each_process_takes_the_gpu_of_its_local_rank(tmp_path, kind, backend):
    before = functools.partial(write_down, kind)
    result = fork_ranks(MANY, cwd=tmp_path, world_size=4, nodes=2, before=before)
    expected = [f"rank {rank}: GPU [{rank % 2}], {backend}" for rank in range(4)]
    assert sorted(result.output.splitlines()) == expected


def test_a_mac_takes_its_cpu(tmp_path, plain):
    """On mps it would fail here, where there is none."""
    result = fork_ranks(MANY, cwd=tmp_path, before=functools.partial(pretend_gpus, 1, "mps"))
    assert_same(ended(result, tmp_path), plain)


@pytest.mark.gpu
def test_both_loops_on_gpus(tmp_path):
    if not (gpus := machine_with_gpus()["gpus"]):
        pytest.skip("torch sees no GPU here")
    environment = {"CUDA_VISIBLE_DEVICES": VISIBLE, "OMP_NUM_THREADS": "1"}
    before = ended(run(PYTHON, ROOT / ONE, cwd=tmp_path, env=environment), tmp_path)
    processes = max(n for n in (1, 2, 4, 8) if n <= gpus)
    result = run(*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", ROOT / MANY,
                 cwd=tmp_path, env=environment)  # fmt: skip
    losses, weights = apart(ended(result, tmp_path), before)
    assert losses < 1.5e-4 and weights < 1e-4


# ---- As a reader starts them ----


@pytest.mark.long
def test_both_loops_as_a_reader_starts_them(tmp_path):
    for name in (ONE, MANY):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # With this variable set, torchrun does not say that it sets it.
    result = run("sh", "-euc", shown.block("both loops"), cwd=tmp_path,
                 env=ACTIVE | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    lines = re.findall(r"^epoch \d: loss \S+$", result.output, LINE)
    assert result.status == 0 and len(lines) == 10 and lines[:5] == lines[5:], result.output


# Put before main(): does anything hold the process group when it is destroyed? Without Python's
# own collector, which could free it by chance.
LOOK = """
import weakref
gc.disable()
destroy = dist.destroy_process_group

def look():
    group = weakref.ref(dist.group.WORLD)
    destroy()
    print(f"rank {os.environ['RANK']}: {'held' if group() else 'free'}\\n", end="", flush=True)

dist.destroy_process_group = look

"""


@pytest.mark.long
def test_nothing_holds_the_process_group_at_the_end(tmp_path):
    """Otherwise a job can abort after its work: pitfalls/no_destroy.py."""
    script = variant(tmp_path, MANY, {"\ndef main():\n": f"{LOOK}\ndef main():\n"})
    result = run(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, cwd=tmp_path)
    said = re.findall(r"^rank (\d): (\w+)$", result.output, LINE)
    assert sorted(said) == [("0", "free"), ("1", "free")], result.output
