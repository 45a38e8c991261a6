"""What --write does: it keeps a report, and shows it as a table in tests/README.md."""

import re

from started import ROOT

from one_gpu.report import REPORT, Report, load, sources

PAGE = ROOT / "tests" / "README.md"
KEPT = ROOT / "docs" / "transcripts" / REPORT
BLOCK = re.compile(
    r"(?<=<!-- written by: python tests/one_gpu FOLDER --write -->\n).*?(?=<!-- end -->)",
    re.DOTALL,
)
NOT_TRIED = "not tried"
LONGEST = 60  # characters of a cell


def write_page(folders):
    """Keep the reports of these folders as one, and show it on the page.

    Where several have a check, the last that has run it counts. Raises a ValueError if one of them
    comes from a pretended GPU.
    """
    whole = Report()
    for folder in folders:
        report = load(folder / REPORT)
        if not report.machine.gpu:
            raise ValueError(f"{folder / REPORT} comes from a pretended GPU: not written")
        whole.machine = report.machine
        for name, entry in report.checks.items():
            before = whole.checks.get(name)
            if entry.figures is None and before and before.figures is not None:
                continue
            entry.date = entry.date or report.machine.date
            whole.checks[name] = entry
    whole.save(KEPT)
    lines = "\n".join(rows_of(whole))
    PAGE.write_text(BLOCK.sub(lambda _: f"\n{lines}\n\n", PAGE.read_text()))


def rows_of(report):
    """The lines of the page: the machine, and a table with a row for each script."""
    if not report.checks:
        return ["Not run."]
    machine = report.machine
    where = (
        f"One GPU: {machine.gpu} (CUDA {machine.cuda}, NCCL {machine.nccl}), torch"
        f" {machine.torch}, Python {machine.python}, on {machine.date}."
    )
    lines = [where]
    if machine.sources != sources():
        lines += ["The code has changed since, and has not run on a GPU again."]
    lines += ["", "| What | On one GPU |", "|---|---|"]
    seen = {**scripts(report), **recipes(report), **others(report)}
    for name, on_a_gpu in seen.items():
        if max(len(name), len(on_a_gpu)) > LONGEST:
            raise ValueError(f"more than {LONGEST} characters: {name}: {on_a_gpu}")
        lines.append(f"| {name} | {on_a_gpu} |")
    return lines


def scripts(report):
    """{script: what one GPU has shown of it}."""
    return {
        "01_single_node_multi_gpu.py": shown(report, "lesson-01"),
        "02_torchrun_elastic.py": shown(report, "lesson-02", killed),
        "03_multinode.py": shown(report, "lesson-03", lambda _: "works with one rank"),
        "04_collectives.py": f"{NOT_TRIED}: needs two GPUs",
        "05_tcpstore.py": f"{NOT_TRIED}: has no use for one",
        "06_model_parallel_ddp.py": f"{NOT_TRIED}: needs two GPUs",
        "template/train.py": shown(report, "template", killed),
        "template/least.py": NOT_TRIED,
        "template/example/": NOT_TRIED,
        "template/trainer/": NOT_TRIED,
    }


def recipes(report):
    """{recipe: what one GPU has shown of its answer, pasted into a plain script}."""
    entry = report.checks.get("recipes")
    names = [path.stem for path in sorted(ROOT.glob("recipes/*.py"))]
    found = {f"recipes/{name}.py": NOT_TRIED for name in names}
    if entry is None or entry.figures is None:
        return found
    one, two = (ways(entry.figures, way) for way in ("one rank, NCCL", "two ranks, Gloo"))
    for name in names:
        if name in one or name in two:
            found[f"recipes/{name}.py"] = pasted(one.get(name), two.get(name))
    if shown(report, "context-parallel") == "works":
        found["recipes/context_parallel.py"] = (
            "fails: it needs a CPU; torch's own works with one rank"
        )
    return found


def pasted(one, two):
    """What came of a recipe with one rank by NCCL, and with two by Gloo, which share the GPU.

    "works" says that both did: so the page explains it, above the table.
    """
    if one == two == "works":
        return "works"
    if one == "works":
        return f"works with one rank; two by Gloo: {two}"
    if two == "works":
        return f"works with two ranks by Gloo; one by NCCL: {one}"
    return f"fails with one rank by NCCL; two by Gloo: {two}"


def ways(figures, way):
    """{recipe: "works", "a crash" or "an error"} of the recipes that were started that way."""
    held = figures[way].partition(": ")[2].split(", ")
    told = dict(line.split(": ", 1) for line in figures[f"{way}: the others"])
    failed = {
        name: "a crash" if "a rank ended with -" in text else "an error"
        for name, text in told.items()
    }
    return failed | dict.fromkeys(held, "works")


def others(report):
    """{tool or folder: what one GPU has shown of it}."""
    return {
        "tools/check_machines.py": NOT_TRIED,
        "tools/check_training.py": shown(report, "check-training"),
        "tools/kill_test.py": NOT_TRIED,
        "pitfalls/": f"{NOT_TRIED}, but for the messages of some",
        "exercises/": f"{NOT_TRIED}: they run on the CPU",
        "benchmarks/throughput.py": shown(report, "throughput"),
        "benchmarks/ddp_anatomy.py": shown(report, "ddp-anatomy"),
        "benchmarks/recovery.py": shown(report, "recovery"),
        "the other benchmarks": NOT_TRIED,
    }


def shown(report, name, in_words=lambda _: "works"):
    """What a check has shown; in_words: what its figures mean."""
    entry = report.checks.get(name)
    if entry is None or entry.result.startswith(("not run", "skipped")):
        return NOT_TRIED
    if entry.figures is None:
        return entry.result.replace("failed", "fails", 1)
    return in_words(entry.figures)


def killed(figures):
    """What the figures of a training say that was killed, and of one that was not."""
    if figures.get("defaults: a killed run is equal"):
        return "works; killed, it ends with equal bits"
    if figures.get("deterministic: a killed run is equal"):
        return "works; equal bits only with deterministic settings"
    if "went on" in figures.get("a killed run", ""):
        return "works; killed, it went on; its end was not seen"
    return "works; killed, it ends with other bits"
