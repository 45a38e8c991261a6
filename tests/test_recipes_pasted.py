"""recipes/: the first lines of each, pasted as they stand into a plain script, are right.

The script of each is pasted/NAME.py, which stands below pasted/plain.py. The answer takes the place
of "# PASTE"; or its parts, between which it has a comment or an empty line, that of "# PASTE1",
"# PASTE2", ... The script sees what the recipe defines, and may have its own of the same name.
Where the answer has "...", it calls your_step(). The script fails unless the answer has done what
the recipe is for.

To step through it: python tests/test_recipes_pasted.py NAME prints it as a whole.
"""

import re
import sys
import textwrap

import as_gpu
import pytest
from forked import fork_ranks, variant
from started import ROOT

RECIPES = {path.stem: path for path in sorted(ROOT.glob("recipes/*.py"))}
PASTED = ROOT / "tests/pasted"
# {recipe: how many ranks: in plain pytest, and in the long tests}. Three load what two have saved.
# tensor_parallel has a mesh of two columns; two machines, or two stages, of two ranks are four.
SIZES = {
    "checkpoint_any_world_size": [(2,), (2, 3)],
    "tensor_parallel": [(2,), (4,)],
    "shard_inside_machines": [(4,), (3,)],
    "three_dimensions": [(4,), (8,)],
    "dry_run_1024_ranks": [(1,)],
}
SLOW = {"dry_run_1024_ranks", "three_dimensions"}
FOR_CPUS = {"dry_run_1024_ranks", "go_on_without", "who_is_missing"}  # they say so
AS_GPU = as_gpu.defaults, as_gpu.device


def pasted(name):
    """The reader's script with the answer in it: the indented lines below the recipe's question."""
    recipe = RECIPES[name].read_text()
    lines = re.match(r'r?""".+\n\n((?:(?:    .*)?\n)+)', recipe)[1]
    answer = textwrap.dedent(lines).rstrip() + "\n"
    answer = re.sub(r"^( +)\.\.\.", r"\1your_step()", answer, flags=re.MULTILINE)
    parts = re.split(r"(?:^(?:#.*|)\n)+", answer, flags=re.MULTILINE)
    script = (PASTED / f"{name}.py").read_text()
    marks = re.findall(r"^ *# PASTE(\d?)$", script, re.MULTILINE)
    assert marks == [""] or len(marks) == len(parts), f"{len(parts)} parts for {len(marks)} places"
    parts.insert(0, answer)
    script = re.sub(
        r"^( *)# PASTE(\d?)\n",
        lambda mark: textwrap.indent(parts[int(mark[2] or 0)], mark[1]),
        script,
        flags=re.MULTILINE,
    )
    plain = (PASTED / "plain.py").read_text().replace("RECIPE", str(RECIPES[name]))
    return f"{plain}{script}\nprint('done on rank', rank, flush=True)\n"


@pytest.mark.parametrize(
    ("name", "sizes", "before"),
    [
        *(
            pytest.param(
                name,
                sizes,
                None,
                id=f"{name}-{sizes}",
                marks=[pytest.mark.long] * (are_long or name in SLOW),
            )
            for name in RECIPES
            for are_long, sizes in enumerate(SIZES.get(name, [(2,), (3,)]))
        ),
        *(
            pytest.param(
                name, SIZES.get(name, [(2,)])[0], AS_GPU, id=f"{name}-gpu", marks=pytest.mark.long
            )
            for name in sorted(RECIPES.keys() - FOR_CPUS)
        ),
    ],
)
def test_the_answer_pasted_into_a_plain_script(tmp_path, name, sizes, before):
    """Also with the defaults of a GPU."""
    (tmp_path / "plain.py").write_text(pasted(name))
    for world_size in sizes:
        result = fork_ranks(
            tmp_path / "plain.py", cwd=tmp_path, world_size=world_size, before=before
        ).ok()
        assert result.output.count("done on rank") == world_size


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "expert_parallel",
            '[{"params": experts}, {"params": rest_of(model, experts)}]',
            "model.parameters()",
            "got mixed torch.Tensor and DTensor",
        ),
        (
            "expert_parallel",
            "model = YourModel().to(device)  #",
            "model = YourModel()  #",
            "all tensors to be on the same device",
        ),
        ("contrastive", ", device=a.device", "", "all tensors to be on the same device"),
        ("agree", 'backend="gloo"', "", "No backend type associated with device type cpu"),
        (
            "unequal_micro_batches",
            "dist.all_reduce(tokens)",
            "dist.all_reduce(inputs.t())",
            "Tensors must be contiguous",
        ),
    ],
)
def test_what_a_gpu_refuses_is_refused(tmp_path, name, old, new, message):
    (tmp_path / "plain.py").write_text(pasted(name))
    script = variant(tmp_path, tmp_path / "plain.py", {old: new})
    result = fork_ranks(script, cwd=tmp_path, before=AS_GPU)
    assert result.status == 1 and message in result.output, result.output


def test_an_error_of_your_own_does_not_loop(tmp_path):
    """The answer of go_on_without meets again and again, unless it sees that nobody is missing."""
    (tmp_path / "plain.py").write_text(pasted("go_on_without"))
    script = variant(
        tmp_path,
        tmp_path / "plain.py",
        {
            "mse_loss(model(all_inputs[own])": (
                'assert meeting < 3, "it loops"\n        mse_loss(model(all_inputs[own, :4])'
            )
        },
    )
    result = fork_ranks(script, cwd=tmp_path)
    assert result.status == 1 and "it loops" not in result.output, result.output
    assert "mat1 and mat2 shapes cannot be multiplied" in result.output


if __name__ == "__main__":
    print(pasted(sys.argv[1]))
