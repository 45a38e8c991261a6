"""One mistake at a time, in a recipe, for test_recipes.py; and what a new recipe needs.

It needs no test function. It is a proof on a CPU: dist.init_process_group("gloo"), no choice of a
device, no options, and at most 375 lines. Its right way's function holds the lines of the answer,
and stands beside the wrong ways. It ends with a RuntimeError if its claim does not hold.

Its docstring begins with the question and an empty line. Then come the answer, as indented code,
the explanation, the command on a line of its own, and lines of the output, [rank 0/2] ..., which
test_recipes.py compares. These must be there, too:

- tests/pasted/my_recipe.py: a plain script with a line "# PASTE" where the recipe's answer goes,
  which fails if the answer does not work. It sees what pasted/plain.py defines, moves its own
  tensors and models .to(device), and takes a step of an optimizer where the answer trains;
- in recipes/README.md, its row, with the docstring's question;
- in BROKEN, below, a row: the recipe's name, a pattern of the RuntimeError's message, the text that
  makes the recipe right (it must occur once), and what takes its place;
- in SLOW of test_recipes.py, its name, if it takes more than two seconds.
"""

# Changes with which the broken recipes are quicker.
SMALL = {
    "leave_in_time": {'.pt")) for way in WAYS': '.pt")) for way in WAYS[3:4]'},
    "dry_run_1024_ranks": {
        "RANKS, RANK = 1024, 8": "RANKS, RANK = 64, 8",
        '"width": 4096, "blocks": 8, "rows": 4096': '"width": 64, "blocks": 4, "rows": 64',
        'start_method="forkserver"': 'start_method="fork"',
    },
    "go_on_without": {'mp.get_context("spawn")': 'mp.get_context("fork")'},
}
# Their broken copies run in plain pytest, too.
QUICK = {"metrics", "resume_mid_epoch", "unequal_micro_batches"}
# [(recipe, the error's message, a statement, what stands in its place)]
BROKEN = [
    (
        "accumulate",
        "no_sync around both",
        "i < len(micro_batches) - 1 else contextlib.nullcontext():\n            (mean",
        "i < 0 else contextlib.nullcontext():\n            (mean",
    ),
    (
        "agree",
        r"not all left together: early stopping, epochs \[3, 3\], errors \['', 'Timed out",
        'them. All ranks must call it."""\n',
        'them."""\n    return condition\n',
    ),
    (
        "checkpoint_activations",
        "not so: the right ways keep a block's input",
        "(block, **options)",
        "(block, **options) if compiler is None else block",
    ),
    (
        "checkpoint_any_world_size",
        "training goes on in another way",
        "manual_seed(step)",
        "manual_seed(step * world_size)",
    ),
    ("clip_and_scale", "nan weights without and with", "norm.isfinite() or not look", "True"),
    ("clip_and_scale", "two optimizers: nan", "not look or norm.isfinite()", "True"),
    (
        "context_parallel",
        r"not so: the model's gradient is that of one process\n",
        "return out * weights[0] + part * weights[1]",
        "return out + part",
    ),
    (
        "contrastive",
        "AllGather does not give",
        "dist.reduce_scatter(own, parts)\n",
        "own = parts[dist.get_rank()]\n",
    ),
    (
        "dry_run_1024_ranks",
        r"FSDP2: rank \d+ has .*; its dry run",
        'fully_shard(block, mesh=mesh["data"])\n',
        (
            'fully_shard(block, mesh=mesh["data"],'
            "            reshard_after_forward=dist.get_backend() == 'fake')\n"
        ),
    ),
    (
        "evaluate_with_shards",
        r"evaluation: \[0\] wait in vain; loss 3",
        (
            "if i < len(batches):  # otherwise it was only for the others\n"
            "                total[0] += losses.double().sum()\n"
        ),
        "if True:\n                total[0] += losses.double().sum()\n",
    ),
    (
        "expert_parallel",
        "not so: the right ways have the gradient of one process",
        "torch.cat(outputs)[by_expert.argsort()]",
        "torch.cat(outputs)",
    ),
    (
        "go_on_without",
        "the survivors did not train as",
        "job)\n            dist.barrier()\n",
        "job, old_share)\n            dist.barrier()\n",
    ),
    (
        "leave_in_time",
        "this is not what this file says of asks in each step",
        "dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)",
        "flag.zero_()",
    ),
    (
        "metrics",
        "AUC over all ranks: 0.",
        "dist.all_gather_object(shares, own, group=cpus)",
        "shares = [own]",
    ),
    (
        "pretrained_to_shards",
        "rank 0 reads: outputs off by",
        "    fill_buffers(model, YourModel)\n    state",
        "    state",
    ),
    (
        "randomness",
        "the dropout masks do not repeat",
        "manual_seed(seed(step, world_size, rank))",
        "manual_seed(seed(step, 2, rank % 2 * 2))",
    ),
    ("resume_mid_epoch", "going on by", "shuffled(epoch, self", "shuffled(self.rank, self"),
    (
        "send_fewer_bytes",
        "the bytes are not as few",
        "(None, default_hooks.bf16_compress_hook)\n",
        "(None, default_hooks.allreduce_hook)\n",
    ),
    (
        "shard_inside_machines",
        "not so: .*only rows by machine give another gradient",
        "    for block in model.blocks:\n        fully_shard(block, mesh=mesh, **options)",
        (
            "    mesh = mesh['shard']\n"
            "    for block in model.blocks:\n        fully_shard(block, mesh=mesh, **options)"
        ),
    ),
    (
        "shard_with_fsdp2",
        "FSDP2: this is not",
        "fully_shard(block, mesh=mesh, **options)  # gathered",
        "pass  # gathered",
    ),
    (
        "stream",
        "split by rank and worker: not every sample is delivered 1 times",
        "start, step = self.rank * workers + me, self.world_size * workers\n        # Every",
        "start, step = self.rank, self.world_size\n        # Every",
    ),
    (
        "tensor_parallel",
        "not so: split layers train like one process",
        '[mesh["dp"].get_local_rank() :: mesh["dp"].size()]',
        "[dist.get_rank() :: dist.get_world_size()]",
    ),
    (
        "tensor_parallel",
        ".*got mixed torch.Tensor and DTensor",
        "AdamW(by_mesh(model.parameters()),",
        "AdamW(model.parameters(),",
    ),
    (
        "three_dimensions",
        "dp 1, pp 4, tp 2 does not train",
        "dist.all_reduce(tied.grad.to_local(), group=ends)",
        "pass",
    ),
    (
        "unequal_micro_batches",
        "the sum over all tokens does",
        "dist.all_reduce(tokens)  # of",
        "# of",
    ),
    (
        "weights_to_serve",
        "the averaged weights differ",
        "(model(torch.randn",
        "(model.module(torch.randn",
    ),
    (
        "who_is_missing",
        "the call that rank 0 made alone is not",
        "if dist.get_rank() == 0:\n        val",
        "if True:\n        val",
    ),
]
