"""recipes/: each prints the figures that it shows, fails without its cure, and says what is wrong.

What a recipe claims, it checks itself: it ends with an error if that does not hold.
"""

import ast
import re
import runpy

import as_gpu
import pytest
from forked import fork, fork_ranks, variant, wait_before_forks
from mistakes.recipes import BROKEN, QUICK, SMALL
from started import PYTHON, ROOT, TORCHRUN, run

NAMES = sorted(path.stem for path in ROOT.glob("recipes/*.py"))
# They take long. In plain pytest, the answers of most are tested, pasted into a script.
SLOW = {
    "checkpoint_activations",
    "checkpoint_any_world_size",
    "context_parallel",
    "dry_run_1024_ranks",
    "evaluate_with_shards",
    "expert_parallel",
    "go_on_without",
    "leave_in_time",
    "pretrained_to_shards",
    "randomness",
    "send_fewer_bytes",
    "shard_inside_machines",
    "shard_with_fsdp2",
    "tensor_parallel",
    "three_dimensions",
    "weights_to_serve",
}


def docstring(name):
    return ast.get_docstring(ast.parse((ROOT / f"recipes/{name}.py").read_text()), clean=False)


def ranks(name):
    """How many ranks the command in the docstring starts; 0 for plain python."""
    found = re.findall(
        rf"^    (?:torchrun --standalone --nproc-per-node=(\d)|python) recipes/{name}\.py$",
        docstring(name),
        re.MULTILINE,
    )
    assert len(found) == 1, f"{len(found)} commands in the docstring of {name}"
    return int(found[0] or 0)


def shown_output(name):
    """The lines that the docstring shows, apart from "..."."""
    return re.findall(r"^    (\[rank \d+/\d+\] .+)$", docstring(name), re.MULTILINE)


NUMBER = r"\d+(?:\.\d+)?(?:e[+-]\d+)?"


def like(shown, printed, name):
    """Whether a line is the shown one: up to rounding, which differs from CPU to CPU."""
    lines = [
        re.sub(r"\b[0-9a-f]{12}\b|[\d.]+ (s\b|examples/s)", "#", line)  # checksums and times
        for line in (shown, printed)
    ]
    text, other = (re.sub(rf"{NUMBER}| +", " ", line).split() for line in lines)
    return text == other and (
        name == "leave_in_time"
        or all(  # there, a matter of time
            one == other if one.isdigit() else float(other) == pytest.approx(float(one), 0.02, 2e-5)
            for one, other in zip(*(re.findall(NUMBER, line) for line in lines), strict=True)
        )
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in NAMES]
)
def test_prints_what_its_docstring_shows(tmp_path, name):
    if ranks(name):
        result = fork_ranks(f"recipes/{name}.py", cwd=tmp_path, world_size=ranks(name))
    else:
        result = run(PYTHON, ROOT / f"recipes/{name}.py", cwd=tmp_path, timeout=900)
    # On a single core, PyTorch warns of a DataLoader with two workers.
    # FSDP2 of torch 2.14 warns of modules that end with a linear layer; Dynamo, of Python 3.13.0.
    known = re.compile("suggested max number|_fsdp_state.py:.* returned a view tensor|slower on Py")
    lines = [line for line in result.ok().output.splitlines() if not known.search(line)]
    assert shown_output(name), "no output in the docstring"
    for line in shown_output(name):
        assert any(like(line, printed, name) for printed in lines), (line, result.output)
    assert not [line for line in lines if len(line) > 100 or "Warning" in line]
    assert not [*tmp_path.iterdir()], "files left in the reader's folder"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if ranks(name)])
def test_runs_on_another_number_of_ranks_and_as_on_a_gpu(tmp_path, name):
    # Machines of two ranks; meshes of 8 or 4.
    more = {"shard_inside_machines": 2, "three_dimensions": -4}.get(name, 1)
    defaults = None if name == "who_is_missing" else as_gpu.defaults  # it would name that file
    fork_ranks(
        f"recipes/{name}.py", cwd=tmp_path, world_size=ranks(name) + more, before=defaults
    ).ok()


def test_the_table_of_the_recipes_has_each_question():
    table = re.findall(
        r"^\| (.+\?) \| (.+) \| \[(\w+)\]\((\w+)\.py\) \|$",
        (ROOT / "recipes/README.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(name for _, _, name, _ in table) == NAMES
    for question, answer, name, file in table:
        assert docstring(name).startswith(f"{question}\n") and file == name and answer


def test_a_recipe_is_a_proof_and_no_more():
    """No devices, no options, and short; the answer stands at the top."""
    for name in NAMES:
        text = (ROOT / f"recipes/{name}.py").read_text()
        assert len(text.splitlines()) <= 375, name
        assert not re.search(r"^def (pick_device|parse_args|stop)\b", text, re.MULTILINE), name
    assert {path.stem for path in ROOT.glob("tests/pasted/*.py")} == {"plain", *NAMES}


@pytest.mark.parametrize(
    ("name", "message", "old", "new"),
    [
        pytest.param(
            *row, id=f"{row[0]}-{number}", marks=[pytest.mark.long] * (row[0] not in QUICK)
        )
        for number, row in enumerate(BROKEN)
    ],
)
def test_fails_without_its_cure(tmp_path, name, message, old, new):
    script = variant(tmp_path, f"recipes/{name}.py", SMALL.get(name, {}) | {old: new})
    if ranks(name):
        result = fork_ranks(script, cwd=tmp_path, world_size=ranks(name))
    else:
        result = fork(script, cwd=tmp_path, before=wait_before_forks, timeout=300)
    assert result.status == 1, result.output
    assert re.search(f"RuntimeError: {message}", result.output), result.output


TERMINATED = """
import os, runpy, signal, sys, threading, time
import torch, torch.distributed as dist

save_record_at_sigterm = runpy.run_path(sys.argv[1])["save_record_at_sigterm"]
save_record_at_sigterm(".")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    dist.all_reduce(torch.ones(4))  # rank 1 does not come: until the timeout of 30 minutes
while not os.path.exists("rank0"):
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.long
def test_sigterm_writes_the_record_of_a_rank_that_waits_in_a_call(tmp_path):
    """Started as torchrun does: with a thread of numpy's, which is in no forked process."""
    (tmp_path / "job.py").write_text(TERMINATED)
    recipe = ROOT / "recipes/who_is_missing.py"
    result = run(
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=2",
        "job.py",
        recipe,
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "2"},
    )
    assert 'job.py", line 11 in <module>' in result.output, result.output
    script = runpy.run_path(str(recipe))
    found = script["first_difference"](script["load_records"](tmp_path, 2))
    assert script["describe"](*found)[1:] == [
        "rank 0 called all_reduce Float[4] in <module> (job.py:11)",
        "rank 1 made 1 calls, and no call 2",
    ]


HANGS = {
    "os.kill(os.getpid(), signal.SIGKILL)\n": "time.sleep(20)\n",
    "TIMEOUT = timedelta(seconds=10)": "TIMEOUT = timedelta(seconds=5)",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"KILLED, KILL_STEP = 1": "KILLED, KILL_STEP = 0"}, "rank 0 of 3 died in step 5"),
        (HANGS, "process 1 came too late: the others have gone on without it"),
    ],
    ids=["rank 0", "hangs"],
)
def test_the_others_train_on(tmp_path, changes, said):
    """As one process does, which the recipe itself checks, of rank 1 that dies."""
    script = variant(tmp_path, "recipes/go_on_without.py", SMALL["go_on_without"] | changes)
    result = fork(script, cwd=tmp_path, before=wait_before_forks)
    assert result.status == 0 and said in result.output, result.output
    assert result.numbers(r".* (\d+) of 60 rows never seen, .*") == [("0",), ("20",)]
