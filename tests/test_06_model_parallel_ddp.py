"""06: both ways compute and train as the unsplit model; broken copies and bad calls are noticed."""

import re

import pytest
import torch
import torch.distributed as dist
from support import clocks_differ, fork, fork_ranks, numbers, pretend_one_gpu, variant

SCRIPT = "06_model_parallel_ddp.py"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LITTLE_DATA = {"count=1024": "count=256"}  # an epoch is a step: enough where nothing is learnt


def orders(result):
    """What each drawn stage did: the micro-batches, each once, forward 0 1 2, backward a b c."""
    drawn = [line for (line,) in numbers(r"stage .*\|(.*)\|.*", result)]
    return [re.sub(r"(.)\1+", r"\1", line.replace(".", "")) for line in drawn]


def is_part(short, whole):
    """Whether the letters of short stand in whole in the same order."""
    rest = iter(whole)
    return len(short) >= 4 and all(letter in rest for letter in short)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("06")
    result = fork_ranks(SCRIPT, "2", cwd=folder, world_size=4)
    assert result.status == 0, result.output
    assert not list(folder.iterdir())
    return result


def test_both_ways_compute_and_train_alike(shown):
    found = numbers(r"(.*): gradients off by (\S+), loss by (\S+)", shown)
    assert [way for way, *_ in found] == [
        "devices, 1 micro-batch", "devices, 4 micro-batches", "pipeline, GPipe", "pipeline, 1F1B"]
    assert all(float(gradients) < 1e-5 and float(loss) < 1e-5 for _, gradients, loss in found)
    losses = [float(loss) for (loss,) in numbers(r"epoch \d/2 \| loss ([\d.]+)", shown)]
    assert len(losses) == 4 and losses[:2] == pytest.approx(losses[2:], abs=2e-3)
    assert losses[1] < 0.5 < losses[0]
    assert "Warning" not in shown.output


def test_replicas_and_grid(shown):
    digest = "[0-9a-f]{12}"
    assert len(numbers(f"4 replicas of the model are identical, sha256 {digest}", shown)) == 1
    both = f"2 replicas of each stage are identical, sha256 ({digest}), (?!\\1){digest}"
    assert len(numbers(both, shown)) == 1
    assert "replica 0   rank 0  <-> rank 1" in shown.lines(0)
    assert "replica 1   rank 2  <-> rank 3" in shown.lines(0)


def test_schedules_as_they_ran(shown):
    """GPipe: all forwards, then all backwards. 1F1B: as soon as one is through, in turns."""
    expected = ["0123abcd", "0123abcd", "01a2b3cd", "0a1b2c3d"]
    # On a loaded machine a short stretch can vanish between two columns.
    assert all(map(is_part, orders(shown), expected)) and len(orders(shown)) == 4, orders(shown)
    bubbles = re.findall(r"idle \d+%. .* = (\d+)%,", shown.output)
    assert bubbles == ["20", "20"]


def test_memory(shown):
    pattern = r"rank ([\d ]+), (.*): weights (\S+) MiB, gradients (\S+), Adam (\S+); 50% of .*"
    held = [found.groups() for line in shown.lines() if (found := re.match(pattern, line))]
    assert [(ranks, what) for ranks, what, *_ in held] == [
        ("0 1 2 3", "first half"), ("0 1 2 3", "second half"), ("0 2", "stage 0"),
        ("1 3", "stage 1")]  # fmt: skip
    for *_, weights, gradients, optimizer in held:  # 4 blocks of 263,424 numbers of 4 bytes
        assert float(weights) == float(gradients) == pytest.approx(4 * 263_424 * 4 / 2**20, abs=0.1)
        assert float(optimizer) == pytest.approx(2 * float(weights), abs=0.2)


@pytest.mark.long
def test_other_micro_batches_on_two_ranks(tmp_path):
    five = ("1", "--mode", "devices", "--microbatches", "5", "--batch-size", "64")
    result = fork_ranks(SCRIPT, *five, cwd=tmp_path)
    assert result.status == 0 and "devices, 5 micro-batches: gr" in result.output, result.output
    eight = ("1", "--mode", "pipeline", "--microbatches", "8")
    result = fork_ranks(SCRIPT, *eight, cwd=tmp_path)
    assert result.status == 0 and "= 11%" in result.output, result.output
    assert is_part(orders(result)[0], "01234567abcdefgh")
    assert "one replica of each stage: no other to compare with" in result.lines(0)


def test_two_clocks_make_no_drawing(tmp_path):
    script = variant(tmp_path, SCRIPT, LITTLE_DATA)
    result = fork_ranks(script, "1", "--mode", "pipeline", cwd=tmp_path, nodes=2,
                        before=clocks_differ)  # fmt: skip
    assert result.status == 0 and not orders(result), result.output
    assert "1F1B: no drawing, as the stages are on several machines, whose clocks differ" in (
        result.lines(0))


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="this torch cannot set it")
def test_nobody_waits_for_a_hanging_stage(tmp_path):
    script = variant(tmp_path, SCRIPT, {
        "TIMEOUT = timedelta(minutes=2)": "TIMEOUT = timedelta(seconds=3)",
        "schedule.step(target=": "time.sleep(1000); schedule.step(target="})  # fmt: skip
    result = fork_ranks(script, "--mode", "pipeline", cwd=tmp_path, timeout=60)
    assert result.status == 1 and "Timed out waiting 3000ms" in result.output, result.output


OTHER_RESULT = "does not compute what the unsplit one does"


@pytest.mark.parametrize(("mode", "old", "new", "message"), [
    # Without the two plain passes, DDP's buckets fail at the second step.
    pytest.param("pipeline", "    settle_stage(model, device)", "", "rebuilt_param_indices",
                 marks=pytest.mark.skipif(TORCH <= (2, 11), reason="torch 2.11 has no such fault")),
    # All copies before the second halves; replicas that see the same examples; sums for means;
    # replicas that differ.
    ("devices", "self.second(between))\n        return torch.cat(outputs)",
     "between)\n        return torch.cat([self.second(chunk) for chunk in outputs])",
     "backward leaves the first device idle"),
    ("devices", "[start + replica : ", "[start : ", OTHER_RESULT),
    ("pipeline", "(timed, args.microbatches, loss_fn=cross_entropy",
     "(timed, args.microbatches, loss_fn=cross_entropy, scale_grads=False", OTHER_RESULT),
    ("devices", "    compare_replicas(model, \"the",
     "    next(model.parameters()).data += rank; compare_replicas(model, \"the",
     "replicas of the model differ"),
    ("pipeline", "    compare_replicas(model, \"each",
     "    next(model.parameters()).data += replica; compare_replicas(model, \"each",
     "replicas of each stage differ"),
], ids=["no settle_stage", "copies first", "same share", "sums", "models", "stages"])  # fmt: skip
def test_the_proofs_can_fail(tmp_path, mode, old, new, message):
    script = variant(tmp_path, SCRIPT, LITTLE_DATA | {old: new})
    size = 4 if new.startswith("    next") and mode == "pipeline" else 2
    result = fork_ranks(script, "1", "--mode", mode, cwd=tmp_path, world_size=size)
    assert result.status == 1 and message in result.output, result.output


ONE, GPU = {"world_size": 1}, {"before": pretend_one_gpu}


@pytest.mark.parametrize(("call", "options", "message"), [
    ("", {"world_size": 3}, "3 processes make no grid of 2 stages.*--nproc-per-node=4"),
    ("--mode pipeline", ONE, "make no grid"),
    ("--batch-size 16 --microbatches 9", {}, "use --microbatches 8 or fewer"),
    ("--mode pipeline --microbatches 1", {}, "2 micro-batches or more"),
    ("--mode pipeline --microbatches 5", {}, "make no 5 equal ones"),
    ("--batch-size 33", {}, "give a multiple of 2"),
    ("--batch-size 4096", {}, "up to 1024"),
    ("--mode devices", ONE | GPU, "two GPUs a process, not 1 for 1"),
    ("", GPU, "choose --mode devices"),
    ("--mode pipeline", GPU, "2 processes want a GPU each and there are 1"),
    ("--mode both", ONE, "invalid choice: 'both'"),
    ("0", ONE, "epochs, --microbatches and --batch-size must be 1 or more"),
    ("--batch-size -1", ONE, "must be 1 or more"),
])  # fmt: skip
def test_bad_calls_end_in_one_line(tmp_path, call, options, message):
    result = fork_ranks(SCRIPT, *call.split(), cwd=tmp_path, **options)
    assert result.status == 2 and re.search(message, result.error()), result.output


def test_started_without_torchrun(tmp_path):
    result = fork(SCRIPT, cwd=tmp_path)
    assert result.status == 2 and "--nproc-per-node=4 06_model_parallel_ddp.py" in result.error()
