"""06: the proofs, both schedules as they were drawn, the memory, and each bad call.

Broken copies of the script show that its checks can fail.
"""

import re

import pytest
import torch
import torch.distributed as dist
from support import clocks_differ, fork, fork_ranks, pretend_one_gpu, variant

SCRIPT = "06_model_parallel_ddp.py"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def offsets(result):
    """{way: (gradients off by, loss off by)} as the script reported them."""
    pattern = r"(.*): gradients off by (\S+), loss by (\S+)"
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return {m[1]: (float(m[2]), float(m[3])) for m in found if m}


def drawings(result):
    """The lines of stage 0 and of stage 1, for each schedule, in order."""
    return [re.search(r"\|(.*)\|", line)[1] for line in result.lines(0) if line.startswith("stage ")
            and "|" in line]  # fmt: skip


def order(drawing):
    """The micro-batches in the order of a drawing, each once: forward 0 1 2, backward a b c."""
    return re.sub(r"(.)\1+", r"\1", drawing.replace(".", ""))


def is_part(short, whole):
    """Whether the letters of short stand in whole in the same order."""
    rest = iter(whole)
    return all(letter in rest for letter in short)


def talk_like_gloo():
    """Called in a child: a line as torch 2.10 prints it, which is none of the script's."""
    print("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is"
          " : 1, weights of idle 99%. bubble = 99%", flush=True)  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 4])
def shown(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("06")
    result = fork_ranks(SCRIPT, "2", cwd=folder, world_size=request.param, before=talk_like_gloo)
    assert result.status == 0, result.output
    assert not list(folder.iterdir())
    return request.param, result


def test_loss_and_gradients_are_those_of_the_unsplit_model(shown):
    _, result = shown
    found = offsets(result)
    assert list(found) == [
        "devices, 4 micro-batches", "devices, no cut", "pipeline, GPipe", "pipeline, 1F1B"]
    assert all(gradient < 1e-5 and loss < 1e-5 for gradient, loss in found.values())
    assert not [line for line in result.lines() if len(line) + len("[rank 0/4] ") > 100]
    assert "Warning" not in result.output


def test_both_ways_train_alike(shown):
    _, result = shown
    epochs = [re.match(r"epoch \d/2 \| loss ([\d.]+)", line) for line in result.lines(0)]
    losses = [float(found[1]) for found in epochs if found]
    assert len(losses) == 4 and losses[:2] == pytest.approx(losses[2:], abs=2e-3)
    assert losses[1] < 0.5 < losses[0]


def test_replicas_and_grid(shown):
    size, result = shown
    lines = result.lines(0)
    digest = "[0-9a-f]{12}"
    stages = {2: "one replica of each stage: no other to compare with",
              4: f"2 replicas of each stage are identical, sha256 ({digest}), (?!\\1){digest}"}
    for pattern in (f"{size} replicas of the model are identical, sha256 {digest}", stages[size]):
        assert len([line for line in lines if re.fullmatch(pattern, line)]) == 1, lines
    assert "replica 0   rank 0  <-> rank 1" in lines
    assert ("replica 1   rank 2  <-> rank 3" in lines) == (size == 4)
    assert sum(line.startswith("pid ") for line in result.lines()) == size


def test_schedules_as_they_ran(shown):
    """GPipe: all forwards, then all backwards. 1F1B: as soon as one is through, in turns."""
    _, result = shown
    drawn = [order(line) for line in drawings(result)]
    expected = ["0123abcd", "0123abcd", "01a2b3cd", "0a1b2c3d"]
    assert len(drawn) == 4
    for found, whole in zip(drawn, expected, strict=True):
        # On a loaded machine a short stretch can vanish between two columns.
        assert is_part(found, whole) and len(found) >= 4, (drawn, expected)
    bubbles = [found[0] for line in result.lines(0)
               if (found := re.findall(r"idle (\d+)%. .* = (\d+)%", line))]  # fmt: skip
    assert [bubble for _, bubble in bubbles] == ["20", "20"]


def test_memory(shown):
    size, result = shown
    pattern = r"rank ([\d ]+), (.*): weights (\S+) MiB, gradients (\S+), Adam (\S+); 50% of .*"
    held = [found.groups() for line in result.lines() if (found := re.match(pattern, line))]
    everyone = " ".join(map(str, range(size)))
    columns = [" ".join(map(str, range(stage, size, 2))) for stage in (0, 1)]
    assert [(ranks, what) for ranks, what, *_ in held] == [
        (everyone, "first half"), (everyone, "second half"),
        (columns[0], "stage 0"), (columns[1], "stage 1")]  # fmt: skip
    for *_, weights, gradients, optimizer in held:  # 4 blocks of 263,424 numbers of 4 bytes
        assert float(weights) == float(gradients) == pytest.approx(4 * 263_424 * 4 / 2**20, abs=0.1)
        assert float(optimizer) == pytest.approx(2 * float(weights), abs=0.2)


@pytest.mark.long
def test_micro_batches_of_other_sizes(tmp_path):
    result = fork_ranks(
        SCRIPT, "1", "--mode", "devices", "--microbatches", "5", "--batch-size", "64",
        cwd=tmp_path, world_size=2)  # fmt: skip
    assert result.status == 0, result.output
    assert list(offsets(result)) == ["devices, 5 micro-batches", "devices, no cut"]
    result = fork_ranks(
        SCRIPT, "1", "--mode", "pipeline", "--microbatches", "8", cwd=tmp_path, world_size=2)
    assert result.status == 0, result.output
    assert "= 11%" in result.output and is_part(order(drawings(result)[0]), "01234567abcdefgh")


def test_two_clocks_make_no_drawing(tmp_path):
    result = fork_ranks(SCRIPT, "1", "--mode", "pipeline", cwd=tmp_path, nodes=2,
                        before=clocks_differ)  # fmt: skip
    assert result.status == 0 and not drawings(result), result.output
    assert "1F1B: no drawing, as the stages are on several machines, whose clocks differ" in (
        result.lines(0))


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="this torch cannot set it")
def test_nobody_waits_for_a_hanging_stage(tmp_path):
    script = variant(tmp_path, SCRIPT, {
        "TIMEOUT = timedelta(minutes=2)": "TIMEOUT = timedelta(seconds=5)",
        "schedule.step(target=": "time.sleep(1000); schedule.step(target="})  # fmt: skip
    result = fork_ranks(script, "--mode", "pipeline", cwd=tmp_path, world_size=4, timeout=60)
    assert result.status == 1 and "Timed out waiting 5000ms" in result.output, result.output


@pytest.mark.parametrize(("mode", "old", "new", "message"), [
    # Without the two plain passes, DDP's buckets fail at the second step.
    pytest.param("pipeline", "    settle_stage(model, device)\n", "", "rebuilt_param_indices",
                 marks=pytest.mark.skipif(TORCH <= (2, 11), reason="torch 2.11 has no such fault")),
    # All copies before the second halves; replicas that see the same examples; sums for means;
    # replicas that differ.
    ("devices", "self.second(between))\n        return torch.cat(outputs)",
     "between)\n        return torch.cat([self.second(chunk) for chunk in outputs])",
     "backward leaves the first device idle"),
    ("devices", "[start + replica : ", "[start : ", "does not compute what the unsplit one does"),
    ("pipeline", "(timed, args.microbatches, loss_fn=cross_entropy",
     "(timed, args.microbatches, loss_fn=cross_entropy, scale_grads=False",
     "does not compute what the unsplit one does"),
    ("devices", "    compare_replicas(model, \"the",
     "    next(model.parameters()).data += rank; compare_replicas(model, \"the",
     "replicas of the model differ"),
    ("pipeline", "    compare_replicas(model, \"each",
     "    next(model.parameters()).data += replica; compare_replicas(model, \"each",
     "replicas of each stage differ"),
])  # fmt: skip
def test_the_proofs_can_fail(tmp_path, mode, old, new, message):
    script = variant(tmp_path, SCRIPT, {old: new})
    size = 2 if mode == "devices" else 4
    result = fork_ranks(script, "1", "--mode", mode, cwd=tmp_path, world_size=size)
    assert result.status == 1 and message in result.output, result.output


def test_bad_calls(tmp_path):
    def error(*arguments, **options):
        result = fork_ranks(SCRIPT, *arguments, cwd=tmp_path, **options)
        assert result.status == 2, result.output
        return result.error()

    grid = error(world_size=3)
    assert "3 processes make no grid of 2 stages" in grid and "--nproc-per-node=4" in grid
    assert "make no grid" in error("--mode", "pipeline", world_size=1)
    assert "use --microbatches 8 or fewer" in error("--batch-size", "16", "--microbatches", "9")
    assert "2 micro-batches or more" in error("--mode", "pipeline", "--microbatches", "1")
    assert "make no 5 equal ones" in error("--mode", "pipeline", "--microbatches", "5")
    assert "give a multiple of 2" in error("--batch-size", "33")
    assert "up to 1024" in error("--batch-size", "4096")
    assert "two GPUs a process, not 1 for 1" in error(
        "--mode", "devices", world_size=1, before=pretend_one_gpu)
    assert "choose --mode devices" in error(before=pretend_one_gpu)
    assert "2 processes want a GPU each and there are 1" in error(
        "--mode", "pipeline", before=pretend_one_gpu)
    assert "invalid choice: 'both'" in error("--mode", "both", world_size=1)
    assert "epochs, --microbatches and --batch-size must be 1 or more" in error("0", world_size=1)
    assert "must be 1 or more" in error("--batch-size", "-1", world_size=1)
    assert "invalid int value: 'x'" in error("--microbatches", "x", world_size=1)
    result = fork(SCRIPT, cwd=tmp_path)
    assert result.status == 2 and "--nproc-per-node=4 06_model_parallel_ddp.py" in result.error()
