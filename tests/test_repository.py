"""The promises of the collection as a whole: shared blocks are equal, every command shown runs."""

import ast
import re
import shlex
import shutil
import sys
from collections import Counter, defaultdict

import pytest
import shown
from shown import masked
from support import ACTIVE, PYTHON, ROOT, assert_nothing_left, end, run, start

SCRIPTS = sorted(ROOT.glob("0*_*.py"))
PITFALLS = sorted(ROOT.glob("pitfalls/*.py"))
RECIPES = sorted(ROOT.glob("recipes/*.py"))
OTHERS = [ROOT / "docs/transcripts/draw.py", ROOT / "tests/fault_campaign.py"]
OTHERS += [ROOT / "launch/check_machines.py", ROOT / "launch/kill_test.py"]
SHARED = {ROOT / f"benchmarks/{name}.py" for name in ("common", "launched", "machines")}
OTHERS += sorted(set(ROOT.glob("benchmarks/*.py")) - SHARED)
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
    "python tests/fault_campaign.py --rounds 100": "takes half an hour; test_faults.py plays some",
    "python tests/departures.py --rounds 20": "takes half an hour; test_lab.py plays some",
    "python tests/mutants.py 02 --count 40": "takes half an hour; it runs these tests",
    "python docs/transcripts/draw.py": "takes minutes; test_readme.py draws its logs again",
    "python docs/transcripts/draw.py --redraw": "test_readme.py does the same, and writes nothing",
    "torchrun --standalone --nproc-per-node=2 train.py": "test_one_to_many.py makes it and runs it",
    "python plain.py": "test_one_to_many.py makes it and runs it",
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
    f"python benchmarks/plot.py{file}": "each of the benchmarks draws its own results with it"
    for file in ("", " benchmarks/results/throughput-cpu.json")
}
NOT_RUN |= {
    f"{launcher} benchmarks/smallest_ddp.py {arguments}": "benchmarks/startup.py does, and is run"
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
PROOFS |= {f"pitfalls/{path.name}": r"(symptom|cured): .+" for path in PITFALLS}
PROOFS |= {f"recipes/{path.name}": last_shown(path) for path in RECIPES}
# The environment of both ranks, as torchrun has made it.
PROOFS[None] = r"\[rank 1\] LOCAL_RANK=1"
# Blocks that make sense as a whole only, and the module that runs each, by its name.
RUN_WHOLE = {
    "from one process to many": "test_one_to_many.py",
    "four ways to meet": "test_readme.py",
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
# They start processes of their own; their tests run these very commands.
OWN_LAUNCH = ("fixed_port", "no_destroy", "orphans", "rank_never_arrives", "stale_addresses")
NOT_RUN |= {
    f"python pitfalls/{name}.py{option}": "test_pitfalls_*.py run it, with a look at its figures"
    for name in OWN_LAUNCH
    for option in ("", " --fixed")
}
# Of each other pitfall, the command without --fixed is run as it stands.
NOT_RUN |= {
    f"{launcher} pitfalls/{path.name} --fixed": "test_pitfalls.py launches it"
    for path in PITFALLS
    for launcher in re.findall(r"^    (\S.*) pitfalls/\S+ --fixed$", path.read_text(), re.MULTILINE)
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
    return run(*shlex.split(command), cwd=folder, env=ACTIVE, timeout=600)


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


@pytest.mark.parametrize(("text", "error"), [
    ("```sh\nls\n```\n", "x.md:1: a block needs a name of its own"),
    ("a line\n```bash\nls\n```\n", "x.md:2: a block needs a name of its own"),
    ("```diff\n+a line\n```\n", "x.md:1: a block needs a name of its own"),
    ("<!-- block: a -->\n```bash\nls\n```\n" * 2, "x.md:6: a block needs a name of its own"),
    ("```console\n$ ls\n```\n", "x.md:1: a block of console"),
    ("```\nls\n```\n", "x.md:1: a block of no language"),
])  # fmt: skip
def test_a_block_without_a_name_of_its_own_is_found(tmp_path, text, error):
    (tmp_path / "x.md").write_text(text)
    with pytest.raises(ValueError, match=re.escape(error)):
        shown.named_blocks([tmp_path / "x.md"])


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
    lines = result.lines(0) or result.output.splitlines()
    assert any(re.fullmatch(PROOFS[script], line) for line in lines), result.output
    compare_with_transcript(command, result, request)


def test_every_command_of_the_documents_has_a_transcript():
    run_here = {c for c in set(SHOWN) - set(NOT_RUN) if any(f.endswith(".md") for f in SHOWN[c])}
    assert MAIN_JOB in run_here and (
        set(TRANSCRIPTS.values()) - {shown.LAB_STORY, shown.KILL_TEST} == run_here)
    assert len(set(TRANSCRIPTS.values())) == len(TRANSCRIPTS)
    for path in SCRIPTS:
        assert any(f" {path.name}" in command for command in run_here), path.name


def test_the_output_in_the_documents_is_that_of_the_transcripts():
    showing = []
    for document in shown.DOCUMENTS:
        text = document.read_text()
        blocks = shown.BLOCK.findall(text)
        assert len(blocks) == text.count("```text\n"), f"{document}: a block without a transcript"
        showing += [str(document.relative_to(ROOT))] * len(blocks)
        for name, block in blocks:
            rest = iter(shown.read(shown.FOLDER / name)[1])
            for line in block.splitlines():
                assert line in rest, f"not in {name}, or not in this order: {line}"
    assert Counter(showing) == {"README.md": 1, "docs/how_a_job_starts.md": 1,
                                "launch/README.md": 4, "pitfalls/README.md": 1,
                                "recipes/README.md": 1}  # fmt: skip


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


def other_versions(sources):
    """{name: files} whose function or class of that name has other bytes than it may have.

    sources: {file: source}. Where 01, 02 or 03 have the name, every other file must have one of
    their versions (that these differ from each other under marks only, test_story.py sees to);
    where none of them has it, all files the same. Marks themselves do not count.
    """
    texts = defaultdict(dict)
    for file, source in sources.items():
        lines = re.sub(r"^ *# New in \d\d: .*$", "MARK", source, flags=re.MULTILINE).splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in OWN:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                text = [line for line in lines[first - 1 : node.end_lineno] if line != "MARK"]
                texts[node.name][file] = "\n".join(text)
    found = {}
    for name, versions in texts.items():
        allowed = {text for file, text in versions.items() if file[:3] in ("01_", "02_", "03_")}
        allowed = allowed or {next(iter(versions.values()))}
        if others := [file for file, text in versions.items() if text not in allowed]:
            found[name] = others
    return found, texts


def test_same_name_same_bytes():
    check_machines = [path for path in [ROOT / "launch/check_machines.py"] if path.exists()]
    files = [*SCRIPTS, *check_machines, *PITFALLS]
    found, texts = other_versions({path.name: path.read_text() for path in files})
    shared = {name for name, versions in texts.items() if len(versions) > 1}
    assert {"Net", "evaluate", "log", "pick_device", "save", "stop"} <= shared
    assert found == {}
    # A recipe may have a model or a loss of its own, but no other version of a script's function.
    found, texts = other_versions(
        {str(path.relative_to(ROOT)): path.read_text() for path in [*SCRIPTS, *RECIPES]})
    of_scripts = {name for name, files in texts.items() if any("recipes" not in f for f in files)}
    assert {"log", "pick_device", "stop"} <= of_scripts
    assert {name: files for name, files in found.items() if name in of_scripts} == {}


@pytest.mark.parametrize(("sources", "found"), [
    (("01 a", "02 b", "04 a", "pitfall b"), []),
    (("01 a", "02 b", "04 c"), ["04"]),
    (("01 a", "04 a", "pitfall b", "05 b"), ["pitfall", "05"]),
    (("04 a", "05 a", "pitfall a"), []),
    (("04 a", "05 a", "pitfall b"), ["pitfall"]),
])  # fmt: skip
def test_other_bytes_are_seen(sources, found):
    """The first word: a file; the second: what its function says."""
    sources = {f"{file}_.py": f"@record\ndef log():\n    # New in 0{len(file)}: as a rank\n"
               f"    print('{word}')\n\n\ndef main():\n    return '{file}'\n"
               for file, word in map(str.split, sources)}  # fmt: skip
    others, _ = other_versions(sources)
    assert others.get("log", []) == [f"{file}_.py" for file in found] and others.keys() <= {"log"}


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


def test_every_pitfall_has_its_row():
    assert len(PITFALLS) >= 21
    text = shown.PITFALLS.read_text()
    for path in PITFALLS:
        rows = re.findall(rf"^\|.+\| \[{path.stem}\]\({path.name}\)", text, re.MULTILINE)
        assert len(rows) == 1, f"{path.name} has {len(rows)} rows in pitfalls/README.md"


def test_what_the_readme_says_of_recipes_and_pitfalls():
    """How many there are, and the figures of one."""
    words = " ".join(shown.README.read_text().split())
    assert f"There are {len(RECIPES)} [recipes]" in words
    assert f"Each of {len(PITFALLS)} [pitfalls]" in words
    _, lines = shown.read(shown.FOLDER / "accumulate.txt")
    figures = {re.split(r" {2,}", line)[0].partition("] ")[2]: line.rpartition(" off by ")[2]
               for line in lines if " off by " in line}  # fmt: skip
    assert f"a gradient that is off by {figures['flag set in between']}, relative to" in words
    assert f"Done right, it is off by {figures['no_sync, both passes']}." in words


def test_a_process_that_is_left_behind_is_found(tmp_path):
    """Also in a session of its own, with its output elsewhere, as torchrun's workers can be."""
    sleeper = "['sleep', '60'], start_new_session=True, stdout=-3, stderr=-3"
    process = start(PYTHON, "-c", f"import subprocess; subprocess.Popen({sleeper})", cwd=tmp_path)
    try:
        process.communicate(timeout=60)
        with pytest.raises(AssertionError, match="left behind.*sleep 60"):
            assert_nothing_left(process, patience=0)
    finally:
        end(process)
    assert_nothing_left(process)


def test_no_test_module_imports_another():
    modules = sorted((ROOT / "tests").glob("*.py"))
    assert len(modules) > 20
    for path in modules:
        found = re.findall(r"^ *(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        assert not found, f"{path.name}: what it shares with {found} belongs to support.py"


@pytest.mark.parametrize("document", shown.DOCUMENTS,
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document(document):
    assert shown.links(document) and shown.link_problems(document) == []


@pytest.mark.parametrize("link", [
    "README.md", "#the-scripts", "../README.md#no-such-title", "../05_tcpstore.py#main",
    "../no_such_file.py", "../../elsewhere", "https://example.org/", "#a-comment-of-a-shell",
])  # fmt: skip
def test_a_link_that_leads_nowhere_is_found(monkeypatch, tmp_path, link):
    """In a document in a folder of a copy that has no README.md of its own."""
    root = tmp_path / "copy"
    (root / "docs").mkdir(parents=True)
    for name in ("README.md", "05_tcpstore.py"):
        shutil.copy(ROOT / name, root)
    (tmp_path / "elsewhere").touch()
    monkeypatch.setattr(shown, "ROOT", root)
    good = "[a](../README.md#the-scripts) [b](#a-title-its-text-1) [c](../05_tcpstore.py)"
    page = root / "docs/page.md"
    page.write_text("# A title: its `text`\n\n## A title: its text\n\n"
                    f"```sh\n# A comment of a shell\n```\n\n{good}\n[d]({link})\n")
    assert shown.link_problems(page) == [f"page.md: {link}"]


def test_every_folder_of_the_top_level_has_its_page_and_its_link():
    folders = sorted(path.parent.name for path in ROOT.glob("[!.]*/README.md"))
    assert folders == ["benchmarks", "docs", "launch", "pitfalls", "recipes", "tests"]
    linked = {link.partition("#")[0] for link in shown.links(shown.README)}
    pages = {str(path.relative_to(ROOT)) for path in shown.DOCUMENTS} - {"README.md"}
    assert pages - linked == set(), "README.md does not lead there"


def test_the_documents_that_the_sources_name_are_there():
    """With the path from the top level."""
    found = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py"), *ROOT.glob("launch/*"),
                 shown.FOLDER / "draw.py", ROOT / ".ci/run"]:  # fmt: skip
        if path.name not in ("test_repository.py", "README.md") and path.is_file():
            words = re.findall(r"\b(?:\w+/)?README\.md\b|\bdocs/\w+\.md\b", path.read_text())
            found |= {(word, path.name) for word in words}
    assert ("launch/README.md", "03_multinode.py") in found
    assert {pair for pair in found if not (ROOT / pair[0]).is_file()} == set()
