"""The promises of the collection as a whole: shared blocks are equal, every command shown runs."""

import ast
import pathlib
import re
import shlex
import shutil
import sys
from collections import defaultdict

import pytest
import shown
from shown import masked
from started import ACTIVE, ROOT, run

SCRIPTS = sorted(ROOT.glob("0*_*.py"))
PITFALLS = sorted(ROOT.glob("pitfalls/*.py"))
RECIPES = sorted(ROOT.glob("recipes/*.py"))
TEMPLATE = [ROOT / "template/train.py"]
OTHERS = [
    ROOT / path
    for path in (
        "docs/pictures/draw.py",
        "tools/check_machines.py",
        "tools/kill_test.py",
        "benchmarks/parts/plot.py",
        "benchmarks/parts/smallest_ddp.py",
    )
]
OTHERS += [*sorted(ROOT.glob("benchmarks/*.py")), *TEMPLATE]
# Each script tells its own story there.
OWN = {"main", "parse_args", "worker", "train", "broken", "broken_too", "fixed"}

# Commands that are shown and not run as they stand: {pattern: the reason}.
NOT_RUN = {
    r"torchrun .*-node=gpu .*\b0\d_\w+.py( 50 10)?|python 01\S+.py 50 10|pytest -m gpu": (
        "needs a GPU; the same script runs on the CPU in these tests"
    ),
    "python tools/check_machines.py node1 node2|torchrun --nnodes=2 .* tools/check_machines.py": (
        "test_lab.py runs it on two machines of launch/lab"
    ),
    "sbatch launch/slurm.sbatch 6000 1000": "test_slurm.py runs it, for other epochs on CPUs",
    "python 05_tcpstore.py --role (server|client) --port 29605": (
        "needs its other half: test_05_tcpstore.py runs both, on a free port"
    ),
    r"python download_mnist.py( --(data-dir|mirror) \S+)?": (
        "needs the network; test_download_mnist.py runs it against a mirror on this machine"
    ),
    "python3 -m venv .venv|. .venv/bin/activate|pip install -r requirements(-dev)?.txt": (
        "installs the packages: .ci/run runs it, in a fresh virtual environment"
    ),
    "pytest( -m long( --write-transcripts)?)?": ".ci/run runs the tests",
    "pytest tests/test_(recipes.py tests/test_recipes_pasted.py -k my_recipe|exer.* 22_) .*": (
        "it runs these tests"
    ),
    'pytest .*-m "long or not long" tests/test_check_training.py .*': "it runs these tests",
    r".+ (recipes/(?!acc|agree)|pitfalls/(?!col|no_d|or|own|small_s|sta\S+y$))\w+.py( --fixed)?": (
        "test_recipes.py and test_pitfalls.py run it, in forked processes"
    ),
    "python tests/one_gpu FOLDER( --write)?": "needs a GPU; test_pages.py runs it without one",
    "python tests/trainers --page tools/trainers.md": (
        "test_pages.py runs it on a copy of the page"
    ),
    "python tests/mutants.py 02 --count 40": "takes half an hour; it runs these tests",
    r"python exercises/\w+.py( --watch)?": "test_exercises.py runs it, with other functions",
    "python docs/pictures/draw.py( --redraw)?": "takes minutes; test_pages.py draws them anew",
    shown.KILL_TEST: "test_kill_test.py runs it, with a look at its figures",
    shown.CHECK_TRAINING: "test_check_training.py runs it, on a script with two mistakes",
    r"python benchmarks/\w+.py": "takes minutes; test_benchmarks.py runs it at its smallest",
    "python benchmarks/parts/plot.py( benchmarks/results/throughput-cpu.json)?": (
        "each of the benchmarks draws its own results with it"
    ),
    r"(python|torchrun .*-node=2) benchmarks/parts/smallest_ddp.py( \d)+": "startup.py runs it",
}


def last_shown(path):
    """A pattern for the last line of output in a docstring, whatever its numbers."""
    line = re.findall(r"^    \[rank \d+/\d+\] (.+)$", path.read_text(), re.MULTILINE)[-1]
    return r"\S+".join(map(re.escape, re.split(r"\b[0-9a-f]{12}$|\d[\d.e+-]*", line)))


# What a command without a transcript prints, and without which status 0 would be worth nothing.
PROOFS = {
    "04_collectives.py": "10 sections passed their checks on 4 ranks, by gloo",
    "06_model_parallel_ddp.py": "2 replicas of the model are identical, sha256 .+",
}
PROOFS |= {f"pitfalls/{path.name}": "symptom: .+" for path in PITFALLS}
PROOFS |= {str(path.relative_to(ROOT)): last_shown(path) for path in [*RECIPES, *TEMPLATE]}
MAIN_JOB = (
    "torchrun --standalone --nproc-per-node=2 --max-restarts=3"
    " 02_torchrun_elastic.py 6 1 --crash-epoch 3"
)


def shell_commands(text):
    """The single commands in some lines of shell: comments cut, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"\s+# .*", "", text, flags=re.MULTILINE))
    return [" ".join(part.split()) for part in re.split(r"&&|\n", text) if part.strip()]


def commands_shown():
    """{command: files that show it}, from the documents and from the scripts' docstrings."""
    found = defaultdict(list)
    for document, language, text in shown.named_blocks().values():
        for command in shell_commands(text) if language == "bash" else ():
            found[command].append(str(document.relative_to(ROOT)))
    for document in shown.DOCUMENTS:
        inline = r"`((?:python|torchrun) [^`]+|pytest[^`]*)`"
        for command in re.findall(inline, document.read_text()):
            found[command].append(str(document.relative_to(ROOT)))
    for path in [*SCRIPTS, ROOT / "download_mnist.py", *PITFALLS, *RECIPES, *OTHERS]:
        docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False)
        lines = re.findall(r"^    ((?:python|torchrun).*(?:\\\n.*)*)", docstring, re.MULTILINE)
        assert lines, f"{path.name} shows no command"
        assert path not in PITFALLS or len(lines) == 2 and lines[1].endswith(" --fixed"), lines
        for command in [c for line in lines for c in shell_commands(line)]:
            found[command].append(path.name)
    return dict(found)


SHOWN = commands_shown()
RUN = {
    command for command in SHOWN if not any(re.fullmatch(pattern, command) for pattern in NOT_RUN)
}
TRANSCRIPTS = {shown.read(path)[0]: path for path in shown.FOLDER.glob("*.txt")}


def run_command(command, folder):
    """Run a command as shown, in a folder with copies of the scripts, as a reader's shell does."""
    for path in [*SCRIPTS, ROOT / "download_mnist.py"]:
        shutil.copy(path, folder)
    for name in ("pitfalls", "recipes", "template"):
        shutil.copytree(ROOT / name, folder / name)
    return run(*shlex.split(command), cwd=folder, env=ACTIVE, timeout=1200)


def test_no_reason_is_left_over():
    assert MAIN_JOB in RUN and "README.md" in SHOWN[MAIN_JOB]
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for command in SHOWN), pattern


def test_every_block_is_run():
    """Those of bash command by command, below; each of the others as a whole, by its name."""
    tests = [path.read_text() for path in ROOT.glob("tests/test_*.py")]
    for name, (_, language, _) in shown.named_blocks().items():
        assert language == "bash" or any(f'"{name}"' in text for text in tests), name


def compare_with_transcript(command, result, request):
    """The lines of the ranks are those of the command's transcript, whatever their numbers."""
    path, printed = TRANSCRIPTS[command], shown.of_ranks(result)
    if request.config.getoption("--write-transcripts"):
        shown.write(path, command, printed)
    assert masked(printed) == masked(shown.read(path)[1])


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(RUN - {MAIN_JOB}))
def test_a_command_that_is_shown(tmp_path, command, request):
    result = run_command(command, tmp_path)
    if "small_shared_memory" in command and "cannot mount" in result.output:
        pytest.skip(result.output)
    # torch can abort at the interpreter's end, which is a symptom of one pitfall.
    assert "terminate called" not in result.ok().output or "symptom: " in result.output
    if command in TRANSCRIPTS:
        compare_with_transcript(command, result, request)
        return
    script = next(word for word in command.split() if word.endswith(".py"))
    proof = "cured: .+" if command.endswith(" --fixed") else PROOFS[script]
    lines = [*result.lines(), *result.output.splitlines()]
    assert any(re.fullmatch(proof, line) for line in lines), result.output


def test_every_command_of_the_documents_has_a_transcript():
    of_documents = {c for c in RUN if any(file.endswith(".md") for file in SHOWN[c])}
    transcripts = TRANSCRIPTS.keys() - {
        shown.LAB_STORY,
        shown.KILL_TEST,
        shown.KILL_TEST_MACHINES,
        shown.CHECK_TRAINING,
        shown.EXERCISE,
    }
    assert MAIN_JOB in of_documents <= transcripts <= RUN
    for path in SCRIPTS:
        assert any(f" {path.name}" in command for command in of_documents), path.name


def test_the_output_in_the_documents_is_that_of_the_transcripts():
    for document in shown.DOCUMENTS:
        text = document.read_text()
        blocks = shown.BLOCK.findall(text)
        assert len(blocks) == text.count("```text\n"), f"{document}: a block without a transcript"
        for name, block in blocks:
            rest = iter(shown.read(shown.FOLDER / name)[1])
            for line in block.splitlines():
                assert line in rest, f"not in {name}, or not in this order: {line}"


@pytest.mark.long
def test_the_main_job_prints_what_the_readme_shows(tmp_path, request):
    result = run_command(MAIN_JOB, tmp_path).ok()
    compare_with_transcript(MAIN_JOB, result, request)
    assert "attempt 1: resumed from snapshot.pt at epoch 3" in result.lines(0)
    assert list(result.epochs()) == [1, 2, 3, 4, 5, 6] and result.epochs()[6][1] > 0.95
    whole = run("sh", "-euc", shown.block("never killed"), cwd=tmp_path, env=ACTIVE)
    assert whole.status == 0 and "crash" not in whole.output, whole.output
    assert list(whole.epochs()) == [1, 2, 3, 4, 5, 6]
    assert " sha256 " in whole.lines(0)[-1] and whole.lines(0)[-1] == result.lines(0)[-1]


def functions(path):
    """{name: text} of the functions and classes of a file, but for those in which it is its own."""
    text = path.read_text()
    return {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in OWN
    }


def test_functions_of_one_name_have_one_text():
    """In 04 to 06 and the pitfalls, as in one of 01 to 03. (Of these: test_lessons.py.)"""
    texts = defaultdict(set)
    for path in [*SCRIPTS, *PITFALLS]:
        for name, text in functions(path).items():
            assert path in SCRIPTS[:3] or text in (texts[name] or {text}), f"{path.name}: {name}"
            texts[name].add(text)
    for path in [*RECIPES, ROOT / "tools/check_machines/group.py"]:
        shared = functions(path)
        for name in ("gathered", "pick_device"):
            assert shared.get(name) in {None, *texts[name]}, f"{path.name}: another {name}"


def test_scripts_stand_alone():
    allowed = {"torch", "torchvision", "tqdm", "numpy"}  # torchvision needs numpy, too
    for path in [*SCRIPTS, ROOT / "download_mnist.py", *PITFALLS]:
        imports = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = [getattr(node, "module", node.names[0].name) for node in imports]
        modules = {name.partition(".")[0] for name in names}
        assert modules - set(sys.stdlib_module_names) <= allowed, path.name


def test_the_links_of_the_pages_lead_somewhere():
    for document in shown.DOCUMENTS:
        assert shown.links(document), document
        for link in shown.links(document):
            assert shown.leads_somewhere(document, link), (document, link)
    linked = {link.partition("#")[0] for link in shown.links(shown.README)}
    pages = {
        str(path.relative_to(ROOT))
        for path in shown.DOCUMENTS
        if not {"example", "trainer", "machines.md", "ADDING_A_RULE.md", "trainers.md"}
        & {*path.parts}
    }  # template/ and tools/ lead to these
    pages -= {"README.md"}
    assert pages - linked == set(), "README.md does not lead there"


def test_the_pages_that_the_sources_name_are_there():
    """With the path from the top level."""
    sources = [*SCRIPTS, *PITFALLS, *RECIPES, *OTHERS, *ROOT.glob("launch/*"), ROOT / ".ci/run"]
    for path in filter(pathlib.Path.is_file, sources):
        words = re.findall(r"\b(?:\w+/)?README\.md\b|\bdocs/\w+\.md\b", path.read_text())
        assert [word for word in words if not (ROOT / word).is_file()] == [], path


def test_the_tests_are_shorter_than_what_they_guard():
    assert sum(len(path.read_text().splitlines()) for path in ROOT.glob("tests/*.py")) <= 7800
