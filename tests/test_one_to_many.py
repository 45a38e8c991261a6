"""From one process to many: the README's diff, as the loop before it and the loop after it.

Both are made with the README's own command, and end with the same weights. A copy without one of
the lines that the diff adds does not, or prints something else.
"""

import os
import re
import subprocess

import pytest
import shown
import torch
import torch.distributed as dist
from conftest import VISIBLE, machine_with_gpus
from support import PYTHON, TORCHRUN, fork, fork_ranks, run, variant

DIFF = shown.block("from one process to many")
_, _, TEXT = shown.README.read_text().partition("\n## From one process to many\n")
TEXT = TEXT.partition("\n## ")[0]
[MAKE_AFTER] = re.findall(r"`(sed [^`]+ train\.diff > train\.py)`", TEXT)
[MAKE_BEFORE] = re.findall(r"`(sed [^`]+ train\.diff > plain\.py)`", TEXT)
LINE = re.MULTILINE

ONE_EPOCH = {"range(5)": "range(1)"}

SAMPLER = {
    "DataLoader, DistributedSampler,": "DataLoader, RandomSampler,",
    "DistributedSampler(dataset)": "RandomSampler(dataset, generator=torch.Generator())",
    "sampler.set_epoch(epoch)": "sampler.generator.manual_seed(epoch)",
}
IMPORT = re.search(r"^\+(import torch\.distributed\.nn .*\n)", DIFF, LINE)[1]
REDUCE = re.search(r"^\+( +dist\.all_reduce.*\n)", DIFF, LINE)[1]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder with plain.py, the loop before, and train.py, the loop after."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.diff").write_text(DIFF)
    for command in (MAKE_BEFORE, MAKE_AFTER):
        subprocess.run(command, shell=True, cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def plain(scripts):
    """What the loop before prints, and the weights with which it ends."""
    return ended(fork(scripts / "plain.py", cwd=scripts, before=take_one_thread), scripts)


def take_one_thread():
    """Called in a child: two threads would wait for each other, where other tests run."""
    torch.set_num_threads(1)


def ended(result, folder, epochs=5):
    """([loss of each epoch], weights) of a run; it prints a line for each epoch, and no other."""
    assert result.status == 0, result.output
    # torch 2.10 says which ranks Gloo has connected.
    lines = [line for line in result.output.splitlines() if not line.startswith("[Gloo] ")]
    found = [re.fullmatch(r"epoch (\d): loss (\d+\.\d{4})", line) for line in lines]
    assert all(found) and [int(match[1]) for match in found] == [*range(epochs)], result.output
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


def train_without(folder, scripts, changes):
    """Run the loop after on two ranks, with {what stands there: what shall stand there}."""
    return fork_ranks(variant(folder, scripts / "train.py", changes), cwd=folder)


# ---- The two loops ----


def test_the_diff_is_easy_to_read():
    lines = DIFF.splitlines()
    assert max(map(len, lines)) <= 90
    assert all(not line or line[0] in "+- " for line in lines)
    steps = re.findall(r"^\+ +# Step (\d): (\w+)", DIFF, LINE)
    assert steps == list(zip("123456", ["start", "meet", "share", "wrap", "train", "leave"]))


def test_the_loop_before_learns_and_knows_of_no_other_process(scripts, plain):
    losses, _ = plain
    assert losses[-1] < losses[0] / 100
    shown_losses = re.findall(r"`epoch ([04]): loss (\S+)`", TEXT)
    off = [round(losses[int(number)] - float(loss), 3) for number, loss in shown_losses]
    assert off == [0, 0] and [number for number, _ in shown_losses] == ["0", "4"]
    assert "dist" not in (scripts / "plain.py").read_text()


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_loop_after_ends_with_the_same_weights(tmp_path, scripts, plain, world_size):
    result = fork_ranks(scripts / "train.py", cwd=tmp_path, world_size=world_size)
    assert_same(ended(result, tmp_path), plain)
    assert sorted(os.listdir(tmp_path)) == ["model.pt"]


# ---- What happens without a line ----


@pytest.mark.parametrize("changes", [
    {"    model = DDP(model)\n": "", "model.module": "model"},
    SAMPLER,
    {"64 // dist.get_world_size()": "64"},
    {"        sampler.set_epoch(epoch)  # another order in each epoch\n": ""},
], ids=["DDP", "DistributedSampler", "a share of the batch", "set_epoch"])  # fmt: skip
def test_without_it_the_weights_differ(tmp_path, scripts, plain, changes):
    _, weights = apart(ended(train_without(tmp_path, scripts, changes), tmp_path), plain)
    assert weights > 1e-3


def test_without_all_reduce_the_loss_is_that_of_one_rank(tmp_path, scripts, plain):
    result = train_without(tmp_path, scripts, ONE_EPOCH | {REDUCE: ""})
    [loss], _ = ended(result, tmp_path, epochs=1)
    assert abs(loss - plain[0][0]) > 1e-2


def test_without_rank_0_alone_all_print(tmp_path, scripts):
    result = train_without(tmp_path, scripts, ONE_EPOCH | {"dist.get_rank() == 0": "True"})
    assert result.output.count("epoch 0: ") == 2


def test_without_module_the_plain_model_does_not_load(tmp_path, scripts, plain):
    train_without(tmp_path, scripts, ONE_EPOCH | {"model.module": "model"})
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(weights) == [f"module.{name}" for name in plain[1]]


# ---- GPUs ----


def pretend_gpus():
    """Called in a child: torch says that there are GPUs; the process ends at its group."""
    asked = []
    torch.cuda.is_available, torch.cuda.set_device = lambda: True, asked.append

    def init_process_group(backend):
        print(f"rank {os.environ['RANK']}: GPU {asked}, {backend}\n", end="", flush=True)
        os._exit(0)

    dist.init_process_group = init_process_group


def test_each_process_takes_the_gpu_of_its_local_rank(tmp_path, scripts):
    result = fork_ranks(
        scripts / "train.py", cwd=tmp_path, world_size=4, nodes=2, before=pretend_gpus)
    expected = [f"rank {rank}: GPU [{rank % 2}], nccl" for rank in range(4)]
    assert sorted(result.output.splitlines()) == expected


# ---- As a reader starts them ----


@pytest.mark.long
def test_both_loops_as_a_reader_starts_them(tmp_path, scripts):
    assert "`torchrun --standalone --nproc-per-node=2 train.py`" in TEXT
    alone = run(PYTHON, scripts / "plain.py", cwd=tmp_path)
    before = ended(alone, tmp_path)
    for processes in (2, 4):
        # With this variable set, torchrun does not say that it sets it.
        command = (*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", scripts / "train.py")
        result = run(*command, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
        assert_same(ended(result, tmp_path), before)


@pytest.mark.gpu
def test_both_loops_on_gpus(tmp_path, scripts):
    if not (gpus := machine_with_gpus()["gpus"]):
        pytest.skip("torch sees no GPU here")
    environment = {"CUDA_VISIBLE_DEVICES": VISIBLE, "OMP_NUM_THREADS": "1"}
    before = ended(run(PYTHON, scripts / "plain.py", cwd=tmp_path, env=environment), tmp_path)
    processes = max(n for n in (1, 2, 4, 8) if n <= gpus)
    result = run(*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", scripts / "train.py",
                 cwd=tmp_path, env=environment)  # fmt: skip
    losses, weights = apart(ended(result, tmp_path), before)
    assert losses < 1.5e-4 and weights < 1e-4


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
@pytest.mark.parametrize("outcome", ["free", "held"])
def test_nothing_holds_the_process_group_at_the_end(tmp_path, scripts, outcome):
    """Otherwise a job can abort after its work: pitfalls/no_destroy.py."""
    changes = {"\ndef main():\n": f"{LOOK}\ndef main():\n"}
    if outcome == "held":
        changes |= {IMPORT: ""}
    script = variant(tmp_path, scripts / "train.py", changes)
    result = run(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, cwd=tmp_path)
    said = re.findall(r"^rank (\d): (\w+)$", result.output, LINE)
    assert sorted(said) == [("0", outcome), ("1", outcome)], result.output
