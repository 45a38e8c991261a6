"""pitfalls/ without an error and with a wrong result: the symptom's figures, and the cure's."""

import re

import pytest
from pitfall_runs import both, last_line, show_alone


def test_no_set_epoch(tmp_path):
    broken, fixed = both("no_set_epoch", tmp_path)
    for rank in (0, 1):
        first, second, third = [line.partition("items ")[2] for line in broken.lines(rank)[:3]]
        assert first == second == third and len(first.split()) == 9
    assert broken.lines(0)[0] != broken.lines(1)[0]
    assert broken.lines(0)[-1].startswith("symptom: 1 different order in 3 epochs; rank 0 saw 500 ")
    for rank in (0, 1):
        assert len({line.partition("items ")[2] for line in fixed.lines(rank)[:3]}) == 3
    pattern = r"cured: 3 different orders in 3 epochs; rank 0 saw (\d+) of the 1000 items"
    assert last_line(fixed, pattern)[0] > 800


def test_an_unseeded_dataset(tmp_path):
    facts = r"(\d+) items are in both training shares; (\d+) test items were trained on"
    broken, fixed = both("unseeded_dataset", tmp_path)
    assert broken.lines(0)[0] != broken.lines(1)[0]
    assert all(count > 50 for count in last_line(broken, f"symptom: {facts}"))
    assert fixed.lines(0)[0] == fixed.lines(1)[0]
    assert last_line(fixed, f"cured: {facts}") == [0, 0]


def test_a_padded_evaluation(tmp_path):
    broken, fixed = both("padded_evaluation", tmp_path, world_size=4)
    assert broken.lines(2)[:2] == ["images [2, 6, 0]: 2 of 3 right", "images [2, 6]: 1 of 2 right"]
    wrong = "symptom: accuracy 0.6667 padded, 0.5833 as a mean of means; one process: 0.6000"
    assert broken.lines(0)[-1] == wrong
    assert fixed.lines(2) == ["images [2, 6]: 1 of 2 right"]
    assert fixed.lines(0)[-1] == "cured: accuracy 0.6000 by sums; one process: 0.6000"


def test_a_mean_of_unequal_shards(tmp_path):
    facts = r"gradient (\S+) of its length off one process's"
    broken, fixed = both("mean_of_unequal_shards", tmp_path)
    assert broken.lines(1) == fixed.lines(1) == ["2 of 10 samples"]
    assert last_line(broken, f"symptom: {facts}")[0] > 0.1
    assert broken.lines(0)[0] == fixed.lines(0)[0] == "8 of 10 samples"
    assert last_line(fixed, f"cured: {facts}")[0] < 1e-5


def test_learning_rate_and_world_size(tmp_path):
    name, facts = "learning_rate_and_world_size", r"weights up to (\S+) off those of one process"

    def epochs(result):
        """{(ranks, samples of each): (steps, loss)}"""
        pattern = r"global batch (\d) x (\d+), (\d+) steps an epoch: loss (\S+) after it"
        found = [re.fullmatch(pattern, line) for line in result.lines(0)[:-1]]
        return {(int(m[1]), int(m[2])): (int(m[3]), float(m[4])) for m in found}

    broken, fixed = both(name, tmp_path, world_size=4)
    assert last_line(broken, f"symptom: {facts}")[0] > 0.1
    (steps, loss), (fewer_steps, higher_loss) = epochs(broken)[1, 16], epochs(broken)[4, 16]
    assert (steps, fewer_steps) == (64, 16) and higher_loss > 2 * loss
    assert last_line(fixed, f"cured: {facts}")[0] < 1e-5
    assert epochs(fixed)[1, 16] == (steps, loss)
    assert epochs(fixed)[4, 4] == (steps, pytest.approx(loss, abs=2e-4))


def test_a_small_batch_norm(tmp_path):
    facts = r"outputs are off one process's by up to (\S+)"
    broken, fixed = both("small_batch_norm", tmp_path, world_size=4)
    assert last_line(broken, f"symptom: {facts}")[0] > 0.1
    for rank in range(4):  # whatever the images show
        values = re.match(r"feature 0: tensor\(\[(.*)\]\); ", broken.lines(rank)[0])[1].split(",")
        assert sorted(round(float(value)) for value in values) == [-1, 1]
    assert last_line(fixed, f"cured: {facts}")[0] < 1e-5
    assert fixed.lines(0)[0].startswith(
        "on a CPU: SyncBatchNorm expected input tensor to be on GPU"
    )


def test_an_async_read_too_early(tmp_path):
    broken, fixed = both("async_read_too_early", tmp_path)
    assert broken.lines(0) == [
        "put in 1, read 1",
        "symptom: the sum is 3; rank 0 read 1, and rank 1, which did wait, 2",
    ]
    assert broken.lines(1) == ["put in 2, read 2"]
    assert fixed.lines(0) == [
        "put in 1, read 3",
        "cured: the sum is 3; rank 0 read 3, and rank 1, which did wait, 3",
    ]
    assert fixed.lines(1) == ["put in 2, read 3"]


def test_a_device_from_the_global_rank(tmp_path):
    broken, fixed = both("device_from_global_rank", tmp_path, run=show_alone)
    rows = {tuple(line.split(maxsplit=3)) for line in broken}
    for rank, local_rank in ("2", "0"), ("3", "1"):  # on the second machine
        assert ("1", rank, local_rank, f"cuda:{rank} does not exist") in rows
        assert ("1", rank, local_rank, "cuda:0") in rows
    wrong = "symptom: GPUs in use: 2 of 4 by global rank, 2 of 4 by nothing"
    assert broken[-1] == wrong
    assert [line.split()[3] for line in fixed[1:5]] == ["cuda:0", "cuda:1"] * 2
    assert fixed[-1] == "cured: GPUs in use: 4 of 4 by local rank"


def test_wrapper_not_kept(tmp_path):
    broken, fixed = both("wrapper_not_kept", tmp_path)
    assert broken.lines(0)[-1] == "symptom: gradients [1.0, 3.0] on the two ranks; mean 2"
    assert fixed.lines(0)[-1] == "cured: gradients [2.0, 2.0] on the two ranks; mean 2"
