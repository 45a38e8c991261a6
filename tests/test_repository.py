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
from support import ACTIVE, ROOT, run

SCRIPTS = sorted(ROOT.glob("0*_*.py"))
PITFALLS = sorted(ROOT.glob("pitfalls/*.py"))
RECIPES = sorted(ROOT.glob("recipes/*.py"))
OTHERS = [ROOT / "docs/pictures/draw.py", ROOT / "tests/fault_campaign.py"]
OTHERS += [ROOT / "launch/check_machines.py", ROOT / "launch/kill_test.py"]
OTHERS += sorted(ROOT.glob("benchmarks/*.py"))
OTHERS += [ROOT / f"benchmarks/parts/{name}.py" for name in ("plot", "smallest_ddp")]
# Each script tells its own story there.
OWN = {"main", "parse_args", "worker", "train", "broken", "broken_too", "fixed"}

# Commands that are shown and not run as they stand, each with the reason.
INSTALLS = "installs the packages: .ci/run runs it, in a fresh virtual environment"
GPU = "needs a GPU; the same script runs on the CPU in these tests"
NETWORK = "needs the network; test_download_mnist.py runs it against a mirror on this machine"
TWO_TERMINALS = "needs its other half: test_05_tcpstore.py runs both, on a free port"
LAB = "test_lab.py runs it on two machines of launch/lab, with two processes on each"
NOT_RUN = {
    "python 01_single_node_multi_gpu.py 50 10": GPU,
    "torchrun --standalone --nproc-per-node=gpu 02_torchrun_elastic.py 50 10": GPU,
    "torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-id=345 --rdzv-backend=c10d"
    " --rdzv-endpoint=node1:29603 03_multinode.py 50 10": f"{GPU}; {LAB}",
    "python launch/check_machines.py node1 node2": LAB,
    "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-id=345 --rdzv-backend=c10d"
    " --rdzv-endpoint=node1:29603 launch/check_machines.py": LAB,
    "sbatch launch/slurm.sbatch 50 10": "test_slurm.py runs it, for other epochs on CPUs",
    "torchrun --standalone --nproc-per-node=gpu 04_collectives.py": GPU,
    "python 05_tcpstore.py --role server --port 29605": TWO_TERMINALS,
    "python 05_tcpstore.py --role client --port 29605": TWO_TERMINALS,
    "python download_mnist.py": NETWORK,
    "python download_mnist.py --data-dir /mnt/digits": NETWORK,
    "python download_mnist.py --mirror http://localhost:8000/mnist": NETWORK,
    "python3 -m venv .venv": INSTALLS,
    ". .venv/bin/activate": INSTALLS,
    "pip install -r requirements.txt": INSTALLS,
    "pip install -r requirements-dev.txt": INSTALLS,
    "rm -f snapshot.pt": "says nothing",
    "python tests/fault_campaign.py --rounds 100": "takes half an hour; test_faults.py plays some",
    "python tests/departures.py --rounds 20": "takes half an hour; test_lab.py plays some",
    "python tests/mutants.py 02 --count 40": "takes half an hour; it runs these tests",
    "pytest tests/test_recipes.py tests/test_recipes_pasted.py -k accumulate"
    ' -m "long or not long"': "it runs these tests",
    "python docs/pictures/draw.py": "takes minutes; test_pictures.py draws its logs again",
    "python docs/pictures/draw.py --redraw": "test_pictures.py does the same, and writes nothing",
    shown.KILL_TEST: "test_kill_test.py runs it, with a look at its figures",
    "pytest": "this is it; .ci/run runs it",
    "pytest -m long --write-transcripts": "writes anew; without that option, .ci/run runs it",
    "pytest -m long": ".ci/run runs it",
    "pytest -m gpu": GPU,
}
NOT_RUN |= {
    f"python benchmarks/{name}.py": "takes minutes; test_benchmarks.py runs it at its smallest"
    for name in ("throughput", "scaling", "ddp_anatomy", "network", "recovery", "startup")
}
NOT_RUN |= {
    f"python benchmarks/parts/plot.py{file}": "each of the benchmarks draws its own results with it"
    for file in ("", " benchmarks/results/throughput-cpu.json")
}
NOT_RUN |= {
    f"{launcher} benchmarks/parts/smallest_ddp.py {arguments}": "startup.py does, and is run"
    for launcher, arguments in (("python", "1 2"), ("torchrun --standalone --nproc-per-node=2", 1))
}


def last_shown(path):
    """A pattern for the last line of output in a docstring, whatever its numbers."""
    line = re.findall(r"^    \[rank \d+/\d+\] (.+)$", path.read_text(), re.MULTILINE)[-1]
    return r"\S+".join(map(re.escape, re.split(r"\b[0-9a-f]{12}$|\d[\d.e+-]*", line)))


# What a command of each script ends with, and without which status 0 would be worth nothing.
PROOFS = {
    "01_single_node_multi_gpu.py": r"2 replicas are identical, sha256 \w{12}",
    "02_torchrun_elastic.py": r"2 replicas are identical, sha256 \w{12}",
    "03_multinode.py": r"2 replicas are identical, sha256 \w{12}",
    "04_collectives.py": r"(18 of 18|2 of 2) sections passed their checks on 4 ranks"
    r"| +64 MiB .* GB/s",
    "06_model_parallel_ddp.py": r"\d replicas of (the model|each stage) are identical, sha256 .+",
    "05_tcpstore.py": r"13 lessons, all checks passed on 3 processes; 2 said goodbye .*",
}
PROOFS |= {f"pitfalls/{path.name}": r"symptom: .+" for path in PITFALLS}
PROOFS |= {f"recipes/{path.name}": last_shown(path) for path in RECIPES}
# The environment of both ranks, as torchrun has made it.
PROOFS[None] = r"\[rank 1\] LOCAL_RANK=1"
# Blocks that make sense as a whole only, and the module that runs each, by its name.
RUN_WHOLE = {
    "from one process to many": "test_one_to_many.py",
    "both loops": "test_one_to_many.py",
    "four ways to meet": "test_pages.py",
    "lab: start": "test_lab.py",
    "lab: kill a machine": "test_lab.py",
    "lab: it comes back": "test_lab.py",
    "lab: end": "test_lab.py",
    "start by ssh": "test_lab.py",
    "by hand": "test_lab.py",
    "torch.distributed.launch": "test_lab.py",
    "torchx": "test_torchx.py",
    "never killed": "test_repository.py",
}
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
TRANSCRIPTS = {path: shown.read(path)[0] for path in sorted(shown.FOLDER.glob("*.txt"))}


def run_command(command, folder):
    """Run a command as shown, in a folder with copies of the scripts, as a reader's shell does."""
    for path in [*SCRIPTS, ROOT / "download_mnist.py"]:
        shutil.copy(path, folder)
    for name in ("pitfalls", "recipes"):
        shutil.copytree(ROOT / name, folder / name)
    return run(*shlex.split(command), cwd=folder, env=ACTIVE, timeout=1200)


def test_every_command_is_run_or_has_its_reason():
    assert MAIN_JOB in SHOWN and "README.md" in SHOWN[MAIN_JOB]
    assert set(NOT_RUN) <= set(SHOWN), "reasons for commands that nothing shows any more"


def test_every_block_is_run():
    """Those of bash command by command, above; the others as a whole, by the modules named."""
    blocks = shown.named_blocks()
    as_a_whole = {name for name, (_, language, _) in blocks.items() if language != "bash"}
    assert as_a_whole == set(RUN_WHOLE), "a block that no test runs, or a reason without a block"
    for name, module in RUN_WHOLE.items():
        assert f'"{name}"' in (ROOT / "tests" / module).read_text(), name
    in_ci = re.findall(r'\$\(block "(.*)"\)', (ROOT / ".ci/run").read_text())
    assert len(in_ci) == 2 and all(blocks[name][1] == "bash" for name in in_ci)


def compare_with_transcript(command, result, request):
    """The lines of the ranks are those of the command's transcript, if it has one."""
    if path := next((path for path, first in TRANSCRIPTS.items() if first == command), None):
        printed = [line for line in result.output.splitlines() if line.startswith("[rank ")]
        if request.config.getoption("--write-transcripts"):
            shown.write(path, command, printed)
        assert masked(printed) == masked(shown.read(path)[1])


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(set(SHOWN) - set(NOT_RUN) - {MAIN_JOB}))
def test_a_command_that_is_shown(tmp_path, command, request):
    result = run_command(command, tmp_path)
    assert result.status == 0, result.output
    script = next((word for word in command.split() if word.endswith(".py")), None)
    proof = "cured: .+" if command.endswith(" --fixed") else PROOFS[script]
    lines = [*result.lines(0), *result.output.splitlines()]
    assert any(re.fullmatch(proof, line) for line in lines), result.output
    if command.endswith(" --fixed"):  # also at the end of the interpreter, where torch can abort
        assert "terminate called" not in result.output
    compare_with_transcript(command, result, request)


def test_every_command_of_the_documents_has_a_transcript():
    run_here = set(SHOWN) - set(NOT_RUN)
    of_documents = {c for c in run_here if any(file.endswith(".md") for file in SHOWN[c])}
    transcripts = set(TRANSCRIPTS.values()) - {shown.LAB_STORY, shown.KILL_TEST}
    assert MAIN_JOB in of_documents <= transcripts <= run_here
    assert len(set(TRANSCRIPTS.values())) == len(TRANSCRIPTS)
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
    result = run_command(MAIN_JOB, tmp_path)
    assert result.status == 0, result.output
    compare_with_transcript(MAIN_JOB, result, request)
    assert "attempt 1: resumed from snapshot.pt at epoch 3" in result.lines(0)
    assert list(result.epochs()) == [1, 2, 3, 4, 5, 6] and result.epochs()[6][1] > 0.95
    whole = run("sh", "-euc", shown.block("never killed"), cwd=tmp_path, env=ACTIVE)
    assert whole.status == 0 and "crash" not in whole.output, whole.output
    assert list(whole.epochs()) == [1, 2, 3, 4, 5, 6]
    assert re.search(r" sha256 \w{12}$", whole.lines(0)[-1])
    assert whole.lines(0)[-1] == result.lines(0)[-1]


def functions(path):
    """{name: text} of the functions and classes of a file, without marks of what is new."""
    source = re.sub(r"^ *# New in \d\d: .*\n", "", path.read_text(), flags=re.MULTILINE)
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in OWN:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_functions_of_one_name_have_one_text():
    """That of 01, 02 or 03 (test_story.py has an eye on those), or else of any script.

    A recipe may have a model or a loss of its own, but no other version of a script's function.
    """
    allowed = defaultdict(set)
    for path in SCRIPTS[:3]:
        for name, text in functions(path).items():
            allowed[name].add(text)
    for path in [*SCRIPTS[3:], *RECIPES, ROOT / "launch/check_machines.py", *PITFALLS]:
        for name, text in functions(path).items():
            if path not in RECIPES or name in allowed:
                assert text in (allowed[name] or {text}), f"{path.name}: another {name}"
                allowed[name].add(text)
    assert {"Net", "evaluate", "log", "pick_device", "save", "stop"} <= allowed.keys()


def test_scripts_stand_alone():
    allowed = {"torch", "torchvision", "tqdm", "numpy"}  # torchvision needs numpy, too
    for path in [*SCRIPTS, ROOT / "download_mnist.py", *PITFALLS]:
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
        assert modules - set(sys.stdlib_module_names) <= allowed, path.name


def test_the_links_of_the_pages_lead_somewhere():
    for document in shown.DOCUMENTS:
        assert shown.links(document) and shown.link_problems(document) == [], document
    linked = {link.partition("#")[0] for link in shown.links(shown.README)}
    pages = {str(path.relative_to(ROOT)) for path in shown.DOCUMENTS} - {"README.md"}
    assert pages - linked == set(), "README.md does not lead there"


def test_the_pages_that_the_sources_name_are_there():
    """With the path from the top level."""
    sources = [*SCRIPTS, *PITFALLS, *RECIPES, *OTHERS, *ROOT.glob("launch/*"), ROOT / ".ci/run"]
    for path in filter(pathlib.Path.is_file, sources):
        words = re.findall(r"\b(?:\w+/)?README\.md\b|\bdocs/\w+\.md\b", path.read_text())
        assert [word for word in words if not (ROOT / word).is_file()] == [], path
