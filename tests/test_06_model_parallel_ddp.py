"""06: both ways compute and train as the unsplit model; broken copies and bad calls are noticed."""

import re
from functools import partial

import pytest
import shown
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


def test_both_ways_train_alike_and_show_what_the_pages_show(tmp_path):
    """The script itself compares both with the unsplit model, and the replicas with each other."""
    result = fork_ranks(SCRIPT, cwd=tmp_path, world_size=4)
    assert result.status == 0 and "Warning" not in result.output, result.output
    assert not list(tmp_path.iterdir())
    assert not shown.missing("06_model_parallel_ddp.txt", result, exact="<->|MiB")
    losses = [float(loss) for (loss,) in numbers(r"epoch \d/3 \| loss ([\d.]+)", result)]
    assert losses[:3] == pytest.approx(losses[3:], abs=2e-3) and losses[0] > 1 > losses[1]
    # GPipe: all forwards, then all backwards. 1F1B: as soon as one is through, in turns.
    expected = ["0123abcd", "0123abcd", "01a2b3cd", "0a1b2c3d"]
    # On a loaded machine a short stretch can vanish between two columns.
    assert all(map(is_part, orders(result), expected)), orders(result)
    assert len(numbers(r"\w+: idle \d+%\. .* = 20%, for p = 2 stages", result)) == 2


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
                        before=clocks_differ)
    assert result.status == 0 and not orders(result), result.output
    assert "1F1B: no drawing, as the stages are on several machines, whose clocks differ" in (
        result.lines(0))


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="this torch cannot set it")
def test_nobody_waits_for_a_hanging_stage(tmp_path):
    script = variant(tmp_path, SCRIPT, {
        "TIMEOUT = timedelta(minutes=2)": "TIMEOUT = timedelta(seconds=3)",
        "schedule.step(target=": "time.sleep(1000); schedule.step(target="})
    result = fork_ranks(script, "--mode", "pipeline", cwd=tmp_path, timeout=60)
    assert result.status == 1 and "Timed out waiting 3000ms" in result.output, result.output


OTHER_RESULT = "does not compute what the unsplit one does"
DIGEST = "    sha256 = hashlib.sha256()\n"
APART = (DIGEST, f"    next(model.parameters()).data += dist.get_rank()\n{DIGEST}")



@pytest.mark.parametrize(("mode", "old", "new", "message"), [
    # Without the two plain passes, DDP's buckets fail at the second step.
    pytest.param("pipeline", "    settle_stage(model, device)", "", "rebuilt_param_indices",
                 marks=pytest.mark.skipif(TORCH <= (2, 11), reason="torch 2.11 has no such fault")),
    # All copies before the second halves; replicas that see the same examples; sums for means.
    ("devices", "self.second(between))\n        return torch.cat(outputs)",
     "between)\n        return torch.cat([self.second(chunk) for chunk in outputs])",
     "backward leaves the first device idle"),
    ("devices", "[start + replica : ", "[start : ", OTHER_RESULT),
    ("pipeline", "(timed, args.microbatches, loss_fn=cross_entropy",
     "(timed, args.microbatches, loss_fn=cross_entropy, scale_grads=False", OTHER_RESULT),
    ("devices", *APART, "replicas of the model differ"),
    ("pipeline", *APART, "replicas of each stage differ"),
], ids=["no settle_stage", "copies first", "same share", "sums", "models", "stages"])
def test_the_proofs_can_fail(tmp_path, mode, old, new, message):
    script = variant(tmp_path, SCRIPT, LITTLE_DATA | {old: new})
    size = 4 if "stage differ" in message else 2
    result = fork_ranks(script, "1", "--mode", mode, cwd=tmp_path, world_size=size)
    assert result.status == 1 and message in result.output, result.output


ALONE, PAIR = partial(fork_ranks, world_size=1), fork_ranks
ONE_GPU = {"before": pretend_one_gpu}


@pytest.mark.parametrize(("launch", "call", "message"), [
    (fork, "", "--nproc-per-node=4 06_model_parallel_ddp.py"),
    (partial(fork_ranks, world_size=3), "", "3 processes make no grid of 2 stages.*-node=4"),
    (ALONE, "--mode pipeline", "make no grid"),
    (PAIR, "--batch-size 16 --microbatches 9", "use --microbatches 8 or fewer"),
    (PAIR, "--mode pipeline --microbatches 1", "2 micro-batches or more"),
    (PAIR, "--mode pipeline --microbatches 5", "make no 5 equal ones"),
    (PAIR, "--batch-size 33", "give a multiple of 2"),
    (PAIR, "--batch-size 4096", "up to 1024"),
    (partial(ALONE, **ONE_GPU), "--mode devices", "two GPUs a process, not 1 for 1"),
    (partial(PAIR, **ONE_GPU), "", "choose --mode devices"),
    (partial(PAIR, **ONE_GPU), "--mode pipeline", "2 processes want a GPU each and there are 1"),
    (ALONE, "--mode both", "invalid choice: 'both'"),
    (ALONE, "0", "epochs, --microbatches and --batch-size must be 1 or more"),
    (ALONE, "--batch-size -1", "must be 1 or more"),
])
def test_bad_calls_end_in_one_line(tmp_path, launch, call, message):
    result = launch(SCRIPT, *call.split(), cwd=tmp_path)
    assert result.status == 2 and re.search(message, result.error()), result.output
