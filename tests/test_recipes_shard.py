"""recipes/shard_with_fsdp2.py: its figures, and that it can fail."""

import pytest
from support import assert_fails, fork_ranks, numbers

SCRIPT = "recipes/shard_with_fsdp2.py"
WEIGHTS = 4 * 4 * (96 * 192 + 192 + 192 * 96 + 96)  # float32, 4 blocks


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_shard_with_fsdp2(tmp_path, world_size):
    result = fork_ranks(SCRIPT, cwd=tmp_path, world_size=world_size)
    assert result.status == 0, result.output
    assert numbers(r"DDP +(\d+) +(\d+) +(\d+)", result) == [
        (str(WEIGHTS), str(WEIGHTS), str(2 * WEIGHTS))]  # fmt: skip
    rows = {name: (*map(int, figures), float(off)) for name, *figures, off in numbers(
        r"(.*?) +(\d+) +(\d+) +(\d+) +(\d) of 4  (\S+)", result)}  # fmt: skip
    part = WEIGHTS // world_size
    for name, whole in [("FSDP2", 1), ("FSDP2, 2 micro-batches", 1), ("only the root", 4)]:
        *held, off = rows.pop(name)
        assert held == [part, part, 2 * part, whole] and off < 1e-4
    assert rows == {"optimizer first": (WEIGHTS + part, part, 0, 1, 1)}
    assert numbers(r"FSDP2, the blocks .*: ([\d ]+)", result) == [("0 1 2 3 3 2 1 0",)]
    assert numbers(r"\w+\(\): +(\d+) bytes.*", result) == [
        (str(WEIGHTS),), (str(part),), (str(part + WEIGHTS // 4),)]  # fmt: skip


@pytest.mark.parametrize(("message", "old", "new"), [
    ("FSDP2: this is not", "        fully_shard(block, mesh=mesh, **options)  # gathered",
     "        pass  # gathered"),
    pytest.param("optimizer first: this is not",
                 "    optimizer = new_optimizer(model)\n    shard(model, mesh)\n",
                 "    shard(model, mesh)\n    optimizer = new_optimizer(model)\n",
                 marks=pytest.mark.long),
    pytest.param("FSDP2: this is not", "        clip_grad_norm_(model.parameters(), MAX_NORM)\n"
                 "        optimizer.step()  # each", "        optimizer.step()  # each",
                 marks=pytest.mark.long),
    pytest.param("FSDP2: this is not", "p.detach(), 1 - DECAY", "p.detach(), DECAY",
                 marks=pytest.mark.long),
    pytest.param("FSDP2, 2 micro-batches: this is not", "(i == len(parts) - 1)", "(i == 0)",
                 marks=pytest.mark.long),
    pytest.param("only the root: this is not", "    fully_shard(model, mesh=mesh)\n\n\ndef opt",
                 "    shard(model, mesh)\n\n\ndef opt", marks=pytest.mark.long),
    pytest.param("what is saved is not", "load_state_dict(shards)", "load_state_dict(state)",
                 marks=pytest.mark.long),
    pytest.param("start_in_shards() does not give", "torch.manual_seed(1)  # one seed",
                 "torch.manual_seed(dist.get_rank())  # one seed", marks=pytest.mark.long),
    pytest.param("start_in_shards() does not do", "train(model, new_optimizer(model), batches)",
                 "train(model, new_optimizer(new_model()), batches)", marks=pytest.mark.long),
])  # fmt: skip
def test_shard_with_fsdp2_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, SCRIPT, {old: new}, message)
