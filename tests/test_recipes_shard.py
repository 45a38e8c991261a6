"""recipes/shard_with_fsdp2.py: its figures, and that it can fail."""

import pytest
from support import assert_fails, fork_ranks, numbers, variant

SCRIPT = "recipes/shard_with_fsdp2.py"
BLOCK = 4 * (96 * 192 + 192 + 192 * 96 + 96)  # float32
HEAD = 4 * (96 * 96 + 96)
WEIGHTS = 8 * BLOCK + HEAD


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_shard_with_fsdp2(tmp_path, world_size):
    result = fork_ranks(SCRIPT, cwd=tmp_path, world_size=world_size)
    assert result.status == 0, result.output
    assert numbers(r"DDP +(\d+) +(\d+) +(\d+)", result) == [
        (str(WEIGHTS), str(WEIGHTS), str(2 * WEIGHTS))]  # fmt: skip
    rows = {name: (*map(int, figures), float(off)) for name, *figures, off in numbers(
        r"(.*?) +(\d+) +(\d+) +(\d+) +(\d+)  (\S+)", result)}  # fmt: skip
    part, few = WEIGHTS // world_size, 2 * BLOCK + HEAD
    for name, whole in [("FSDP2", few), ("FSDP2, 2 micro-batches", few),
                        ("only the root", 2 * WEIGHTS)]:  # fmt: skip
        *held, off = rows.pop(name)
        assert held == [part, part, 2 * part, whole] and off < 1e-4
    assert rows == {"optimizer first": (WEIGHTS + part, part, 0, few, 1)}
    assert numbers(r"\w+\(\): +(\d+) bytes.*", result) == [
        (str(WEIGHTS),), (str(part),), (str(part + BLOCK),)]  # fmt: skip


@pytest.mark.parametrize(("message", "old", "new"), [
    ("FSDP2: this is not", "        fully_shard(block, mesh=mesh, **options)  # gathered",
     "        pass  # gathered"),
    # Each block is freed after it has run, but all are fetched before the first one runs.
    ("FSDP2: this is not", '(model, "score")\n',
     '(model, "score")\n    model.set_modules_to_forward_prefetch(list(model.blocks))\n'),
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
    ("a forward outside of training", "if i < len(batches):", "if True:"),
    ("a forward outside of training", "        dist.broadcast(buffer, src=0)", "        pass"),
    pytest.param("aten.addmm.default got mixed", '    register_fsdp_forward_method(model, "score")',
                 "    # registered", marks=pytest.mark.long),
    pytest.param("what is saved is not", "load_state_dict(shards)", "load_state_dict(state)",
                 marks=pytest.mark.long),
    pytest.param("start_in_shards() does not give", "torch.manual_seed(1)  # one seed",
                 "torch.manual_seed(dist.get_rank())  # one seed", marks=pytest.mark.long),
    ("start_in_shards() does not give", "            buffer.copy_(full)", "            pass"),
    pytest.param("without values: table", "        self.blocks, self.head =",
                 '        self.register_buffer("table", torch.ones(1))\n'
                 "        self.blocks, self.head =", marks=pytest.mark.long),
    pytest.param("start_in_shards() does not do", "train(model, new_optimizer(model), batches)",
                 "train(model, new_optimizer(new_model()), batches)", marks=pytest.mark.long),
])  # fmt: skip
def test_shard_with_fsdp2_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, SCRIPT, {old: new}, message)


@pytest.mark.long
def test_an_evaluation_with_unequal_shares_hangs(tmp_path):
    """Unless a rank that has no batch left takes part, as in validation_loss()."""
    script = variant(tmp_path, SCRIPT, {
        "for i in range(most.item()):": "for i in range(len(batches)):",
        "timeout=timedelta(seconds=60)": "timeout=timedelta(seconds=10)",
        "    model.train()\n": "    __import__('time').sleep(60 * (i == 0))\n"})  # fmt: skip
    result = fork_ranks(script, cwd=tmp_path)
    assert result.status == 1 and "losses = (model(inputs)" in result.output, result.output
    assert "Timed out waiting 10000ms" in result.output
