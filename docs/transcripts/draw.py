"""The pictures of the documents: how DDP works, who has which rank, two real jobs from their logs.

    python docs/transcripts/draw.py             # run the jobs, minutes; write their logs, draw
    python docs/transcripts/draw.py --redraw    # draw the logs that are there

One job is killed and resumed. The other shrinks and grows, on two machines of launch/lab, and needs
what that needs. Drawing needs matplotlib: pip install -r benchmarks/requirements.txt
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {
    "svg.hashsalt": "the same names in every file", "font.size": 10, "axes.titlesize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
}  # fmt: skip
from matplotlib import pyplot as plt

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Okabe and Ito's palette, and a grey
BLUE, SKY, ORANGE, GREEN, GREY = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#777777"
ON_ONE = "torchrun --standalone --nproc-per-node=2 --max-restarts=3 02_torchrun_elastic.py 20 4"
CRASH = " --crash-epoch 11"
ON_TWO = (
    "torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --rdzv-id=345 --rdzv-backend=c10d"
    " --rdzv-endpoint=node1:29603"
    " --rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5"
    " 03_multinode.py 300 3"
)


class Log:
    """The lines of commands that run side by side, each with the seconds since the start."""

    def __init__(self, folder):
        self.folder, self.lines, self.begin = folder, [], time.monotonic()

    def note(self, text):
        self.lines.append((time.monotonic() - self.begin, text))

    def start(self, command, **environment):
        self.note(f"$ {command}")
        process = subprocess.Popen(
            shlex.split(command), cwd=self.folder, env=os.environ | environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        def read():
            for line in process.stdout:
                if line.startswith("[rank "):
                    self.note(line.rstrip())

        threading.Thread(target=read, daemon=True).start()
        return process

    def wait_for(self, pattern, count, after=0):
        """Wait for count lines that match, from line number after on."""
        deadline = time.monotonic() + 180
        while sum(bool(re.match(pattern, line)) for _, line in self.lines[after:]) < count:
            if time.monotonic() > deadline:
                sys.exit(f"draw.py: error: no {pattern!r} in\n{self.text()}")
            time.sleep(0.05)

    def text(self):
        return "".join(f"{seconds:6.1f} s  {line}\n" for seconds, line in self.lines)


def read(path):
    """[(seconds, line)] of a log that was written."""
    lines = path.read_text().splitlines()
    return [(float(line[:6]), line[10:]) for line in lines]


def epochs(lines):
    """[(seconds, ranks, epoch, loss)] as rank 0 reported them."""
    found = [(s, re.match(r"\[rank 0/(\d+)\] epoch +(\d+)/\d+ \| loss ([\d.]+)", line))
             for s, line in lines]
    return [(s, int(m[1]), int(m[2]), float(m[3])) for s, m in found if m]


def run_kill_and_resume():
    for name, command in (("uninterrupted", ON_ONE), ("killed", ON_ONE + CRASH)):
        with tempfile.TemporaryDirectory() as folder:
            log = Log(folder)
            status = log.start(command.replace("02_", f"{ROOT}/02_")).wait()
            if status:
                sys.exit(f"draw.py: error: status {status} of\n{log.text()}")
            time.sleep(1)  # for the last lines to be read
            text = log.text().replace(f"{ROOT}/", "")
            (HERE / f"{name}.log").write_text(text)


def run_shrink_and_grow():
    lab = [ROOT / "launch" / "lab"]
    environment = {"LAB": f"draw{os.getpid()}"}
    with tempfile.TemporaryDirectory() as folder:
        log = Log(folder)

        def call(*words):
            subprocess.run([*lab, *words], env=os.environ | environment, check=True)

        def join(node):
            command = f"launch/lab run {node} {ON_TWO}"
            command = command.replace("launch/", f"{ROOT}/launch/").replace(" 03_", f" {ROOT}/03_")
            return log.start(command, **environment)

        call("up")
        try:
            jobs = [join("node1"), join("node2")]
            log.wait_for(r"\[rank 0/4\] epoch", 12)
            log.note("$ launch/lab kill node2")
            call("kill", "node2")
            log.wait_for(r"\[rank 0/2\] epoch", 12)
            before = len(log.lines)
            jobs.append(join("node2"))
            log.wait_for(r"\[rank 0/4\] epoch", 12, after=before)
        finally:
            call("down")
        for job in jobs:
            job.wait(60)
        (HERE / "shrink_and_grow.log").write_text(log.text().replace(f"{ROOT}/", ""))


def draw_kill_and_resume(ax):
    uninterrupted = epochs(read(HERE / "uninterrupted.log"))
    lines = read(HERE / "killed.log")
    [crash] = [i for i, (_, line) in enumerate(lines) if "crash on purpose" in line]
    before, after = epochs(lines[:crash]), epochs(lines[crash:])
    for found, style, label in (
        (uninterrupted, {"color": GREY, "linewidth": 1}, "never killed"),
        (before, {"color": ORANGE, "marker": "o", "markersize": 9, "fillstyle": "none",
                  "linestyle": ""}, "killed: until then"),
        (after, {"color": BLUE, "marker": "x", "markersize": 7, "linestyle": ""},
         "and resumed from its snapshot"),
    ):  # fmt: skip
        ax.plot([e for _, _, e, _ in found], [loss for *_, loss in found], label=label, **style)
    killed_in, first = before[-1][2] + 1, after[0][2]
    ax.axvline(killed_in - 0.5, color=GREY, linestyle=":")
    ax.text(killed_in - 0.3, max(loss for *_, loss in before) / 2,
            f"SIGKILL of rank 1 in epoch {killed_in};\nback at epoch {first}, after the snapshot",
            va="top", fontsize=9)
    ax.set(yscale="log", xlabel="epoch", xticks=range(0, len(uninterrupted) + 1, 2))
    ax.set_title("Training loss of 02 on two ranks: killed and resumed, or not, it is the same")
    ax.legend(frameon=False, fontsize=9)


def draw_shrink_and_grow(ax):
    lines = read(HERE / "shrink_and_grow.log")
    found = epochs(lines)
    for ranks, colour, marker in ((4, BLUE, "o"), (2, ORANGE, "s")):
        mine = [(s, epoch) for s, n, epoch, _ in found if n == ranks]
        ax.plot(*zip(*mine, strict=True), marker, color=colour, markersize=5,
                label=f"{ranks} ranks on {ranks // 2} machine{'s' * (ranks > 2)}")
    [killed] = [s for s, line in lines if "lab kill" in line]
    back = [s for s, line in lines if line.startswith("$") and "run node2" in line][-1]
    for when, text in ((killed, " node2 is killed"), (back, " node2 is back")):
        ax.axvline(when, color=GREY, linestyle=":")
        ax.text(when, 1, text, fontsize=9, va="bottom")
    ax.set(xlabel="seconds since the start", ylabel="epoch done", ylim=(0, None))
    ax.set_title("One job of 03 on two machines: it shrinks, and grows again")
    ax.legend(frameon=False, fontsize=9, loc="lower right")


def box(ax, x, y, width, height, text, colour, **options):
    """A box with its lower left corner at (x, y), and text in its middle."""
    ax.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white"))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", **options)


def arrow(ax, start, end, style, colour="black"):
    ax.annotate("", end, start, arrowprops={"arrowstyle": style, "color": colour})


def draw_ddp(ax):
    ax.set(xlim=(0, 100), ylim=(0, 36))
    ax.axis("off")
    box(ax, 0, 11, 11, 14, "one batch\nof images", GREY, color="white")
    for rank, y, images in ((0, 25, "images 0, 2, 4, ..."), (1, 3, "images 1, 3, 5, ...")):
        ax.add_patch(plt.Rectangle((13.5, y - 2.5), 86, 13, facecolor="#EEEEEE"))
        ax.text(14.5, y + 8.2, f"rank {rank}: a process, its GPU, its replica of the model",
                fontsize=9)
        arrow(ax, (11, 18), (16, y + 3.5), "->")
        box(ax, 16, y, 13, 7, images, "white", fontsize=8)
        box(ax, 30, y, 13, 7, "forward", SKY)
        for i, layers in enumerate(("upper layers", "middle layers", "lower layers")):
            box(ax, 44 + 11.5 * i, y, 11.5, 7, f"backward:\n{layers}", BLUE, color="white",
                fontsize=8)
        box(ax, 84, y, 14.5, 7, "optimizer.step()", GREEN, color="white", fontsize=9)
    for i in range(3):
        x = 55.5 + 11.5 * i
        arrow(ax, (x, 10.3), (x, 24.7), "<->", ORANGE)
        ax.text(x + 0.6, 17.5, f"bucket {i + 1}:\nall-reduce", fontsize=8, va="center")
    ax.text(93, 17.5, "same gradients,\nsame step:\nequal replicas", ha="center", va="center",
            fontsize=9)
    ax.text(30, 17.5, "gradients are averaged\nwhile backward goes on", fontsize=9, va="center")


def draw_six_steps(ax):
    """What two ranks do from start to end, and where they exchange something."""
    ax.set(xlim=(0, 100), ylim=(0, 34))
    ax.axis("off")
    steps = (  # what all do, what rank 0 does, what rank 1 does, exchanged in between, arrow
        ("start", "I am rank 0,\nGPU 0 is mine", "I am rank 1,\nGPU 1 is mine", "", ""),
        ("meet", "init_process\n_group", "init_process\n_group", "addresses", "<->"),
        ("share the data", "images\n0, 2, 4, ...", "images\n1, 3, 5, ...", "", ""),
        ("wrap the model", "DDP(model)", "DDP(model)", "rank 0's\nweights", "->"),
        ("train", "every step;\nreport, save", "every step", "gradients\nin each step", "<->"),
        ("leave", "destroy_process\n_group", "destroy_process\n_group", "", ""),
    )
    for rank, y in ((0, 20), (1, 3)):
        ax.add_patch(plt.Rectangle((0, y - 1.5), 100, 9.5, facecolor="#EEEEEE"))
        ax.text(1, y + 3.2, f"rank {rank}", va="center")
        for i, step in enumerate(steps):
            colour = BLUE if step[3] else GREY
            box(ax, 8 + 15.3 * i, y, 14.5, 6.5, step[1 + rank], colour, color="white", fontsize=8)
    for i, (name, _, _, exchanged, style) in enumerate(steps):
        x = 15.2 + 15.3 * i
        ax.text(x, 30.5, f"{i + 1}. {name}", ha="center")
        if exchanged:
            arrow(ax, (x, 19.7), (x, 9.8), style, ORANGE)
            ax.text(x + 0.8, 14.7, exchanged, va="center", fontsize=8)


def draw_ranks(ax):
    ax.set(xlim=(0, 100), ylim=(0, 34))
    ax.axis("off")
    ax.text(50, 32, "one job: world size 4", ha="center", fontsize=10)
    for node in (0, 1):
        left = 51 * node
        ax.add_patch(plt.Rectangle((left, 0), 49, 30, facecolor="#EEEEEE"))
        ax.text(left + 1.5, 26.5, f"node{node + 1}: node rank {node}, local world size 2")
        for local in (0, 1):
            box(ax, left + 2 + 23 * local, 11, 22, 13,
                f"rank {2 * node + local}\nlocal rank {local}\nGPU {local}", BLUE, color="white")
    box(ax, 2, 2, 45, 6, "store, at MASTER_ADDR and MASTER_PORT", ORANGE)
    ax.text(53, 5, "all four connect to the store on node1,\nand find each other's addresses there",
            va="center", fontsize=9)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--redraw", action="store_true", help="draw the logs that are there")
    args = parser.parse_args()
    if not args.redraw:
        run_kill_and_resume()
        run_shrink_and_grow()
    for name, draw in (("ddp", draw_ddp), ("six_steps", draw_six_steps), ("ranks", draw_ranks),
                       ("kill_and_resume", draw_kill_and_resume),
                       ("shrink_and_grow", draw_shrink_and_grow)):
        figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
        draw(ax)
        figure.savefig(HERE / f"{name}.svg", facecolor="white", metadata={"Date": None})
        print(f"drawn: {HERE.name}/{name}.svg")


if __name__ == "__main__":
    main()
