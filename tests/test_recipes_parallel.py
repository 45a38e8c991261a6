"""recipes/ that split one model over several ranks: their figures, and that each can fail."""

import pytest
from support import assert_fails, fork_ranks, numbers

# ---- tensor_parallel ----


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallel(tmp_path, world_size):
    result = fork_ranks("recipes/tensor_parallel.py", cwd=tmp_path, world_size=world_size)
    assert result.status == 0, result.output
    split = numbers(r"(. x .), (\d+) of (\d+) weights on a rank: gradient off by (\S+),"
                    r" weights by (\S+)", result)  # fmt: skip
    meshes = [f"1 x {world_size}", *["2 x 2"] * (world_size == 4)]
    assert [mesh for mesh, *_ in split] == meshes
    first, blocks = 65 * 64, 2 * (65 * 240 + 241 * 64)
    for _, held, weights, gradient, off in split:
        assert int(weights) == first + blocks
        assert int(weights) / world_size <= int(held) < 1.01 * int(weights) / world_size
        assert float(gradient) < 1e-6 and float(off) < 1e-5
    wrong = numbers(r"(. x .), different rows .*: gradient off by (\S+), no error", result)
    outside = "(. x .), layer outside the plan,"
    mended = numbers(rf"{outside} clip_by_mesh: gradient off by (\S+)", result)
    assert [mesh for mesh, _ in wrong] == [mesh for mesh, _ in mended] == meshes
    assert min(float(off) for _, off in wrong) > 0.5
    assert max(float(off) for _, off in mended) < 1e-6
    messages = ["got mixed torch.Tensor and DTensor", "must have the same mesh"]
    assert numbers(rf'{outside} clip_grad_norm_: "(.*)"', result) == list(
        zip(meshes, messages, strict=False))  # fmt: skip

    # In numbers of four bytes. DDP: all gradients in an all-reduce. FSDP2: the blocks' weights
    # twice, the first layer's once, all gradients. Tensor parallel, for a row: two blocks' outputs
    # and the gradients of their inputs in all-reduces, the first layer's output in an all-gather.
    expected = {"DDP": [2 * (first + blocks)] * 2, "FSDP2": [2 * first + 3 * blocks] * 2,
                "tensor parallel": [64 * 9 * rows for rows in (120, 480)]}  # fmt: skip
    counted = numbers(r"(\S.*\S) +(\d+) bytes in a step with 120 rows, +(\d+) with 480", result)
    assert {name: [int(few) / 4, int(many) / 4] for name, few, many in counted} == expected


@pytest.mark.parametrize(("message", "old", "new"), [
    ("split layers do not train", "return rows[dp.get_local_rank()::dp.size()]",
     "return rows[dist.get_rank()::dist.get_world_size()]"),
    pytest.param("different rows on each rank do no harm",
                 "return rows[dist.get_rank()::dist.get_world_size()]", "return rows",
                 marks=pytest.mark.long),
    ("the outputs of a tp group differ by", "seed_of_rank, seed_of_group)", "seed_of_rank,) * 2"),
    pytest.param("a layer outside the plan, and clip_grad_norm_: no error",
                 "mesh, BLOCKS)\n    message", "mesh)\n    message", marks=pytest.mark.long),
    pytest.param("clip_by_mesh does not clip", "for norm in norms])", "for norm in norms[:1]])",
                 marks=pytest.mark.long),
    pytest.param("the bytes do not grow", "in (ROWS, 4 * ROWS)", "in (ROWS, 2 * ROWS)",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_tensor_parallel_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/tensor_parallel.py", {old: new}, message)


@pytest.mark.long
def test_tensor_parallel_needs_the_groups_to_exchange(tmp_path):
    changes = {'if mesh["dp"].size() > 1:  # several': "if False:  # several"}
    assert_fails(tmp_path, "recipes/tensor_parallel.py", changes, "split layers do not train", 4)


def test_tensor_parallel_refuses_what_it_cannot_split(tmp_path):
    result = fork_ranks("recipes/tensor_parallel.py", cwd=tmp_path, world_size=7)
    assert result.status == 2
    assert result.error().endswith("must be multiples of the number of ranks, which is 7")
