"""The pictures of the documents: how DDP works, who has which rank, and real jobs from their logs.

    python docs/pictures/draw.py             # run the jobs, minutes; write their logs, draw
    python docs/pictures/draw.py --redraw    # draw the logs that are there

One job is killed and resumed. Another shrinks and grows, on two machines of launch/lab, and needs
what that needs. The others run undisturbed. Drawing needs matplotlib:
pip install -r requirements-dev.txt

Three pictures move: buckets.svg, ring.svg and kill.svg. They play what three files in
docs/transcripts say: 04_collectives.txt, main_job.txt and main_job_not_killed.log.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from xml.sax.saxutils import escape

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {
    "svg.hashsalt": "the same names in every file",
    "svg.fonttype": "none",  # text as text
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
}
from matplotlib import pyplot as plt

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LOGS = ROOT / "docs/transcripts"
# Okabe and Ito's palette, and a grey
BLUE, SKY, ORANGE, GREEN, GREY = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#777777"
ON_ONE = "torchrun --standalone --nproc-per-node=2 --max-restarts=3 02_torchrun_elastic.py 20 4"
CRASH = " --crash-epoch 11"
MAIN_JOB_NOT_KILLED = ON_ONE.replace(" 20 4", " 6 1")
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
            shlex.split(command),
            cwd=self.folder,
            env=os.environ | environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

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
    found = [
        (s, re.match(r"\[rank 0/(\d+)\] epoch +(\d+)/\d+ \| loss ([\d.]+)", line))
        for s, line in lines
    ]
    return [(s, int(m[1]), int(m[2]), float(m[3])) for s, m in found if m]


def run_kill_and_resume():
    for name, command in (
        ("uninterrupted", ON_ONE),
        ("killed", ON_ONE + CRASH),
        ("main_job_not_killed", MAIN_JOB_NOT_KILLED),
    ):
        with tempfile.TemporaryDirectory() as folder:
            log = Log(folder)
            status = log.start(command.replace("02_", f"{ROOT}/02_")).wait()
            if status:
                sys.exit(f"draw.py: error: status {status} of\n{log.text()}")
            time.sleep(1)  # for the last lines to be read
            text = log.text().replace(f"{ROOT}/", "")
            (LOGS / f"{name}.log").write_text(text)


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
        (LOGS / "shrink_and_grow.log").write_text(log.text().replace(f"{ROOT}/", ""))


def draw_kill_and_resume(ax):
    uninterrupted = epochs(read(LOGS / "uninterrupted.log"))
    lines = read(LOGS / "killed.log")
    [crash] = [i for i, (_, line) in enumerate(lines) if "crash on purpose" in line]
    before, after = epochs(lines[:crash]), epochs(lines[crash:])
    for found, style, label in (
        (uninterrupted, {"color": GREY, "linewidth": 1}, "never killed"),
        (
            before,
            {"color": ORANGE, "marker": "o", "markersize": 9, "fillstyle": "none", "linestyle": ""},
            "killed: until then",
        ),
        (
            after,
            {"color": BLUE, "marker": "x", "markersize": 7, "linestyle": ""},
            "and resumed from its snapshot",
        ),
    ):
        ax.plot([e for _, _, e, _ in found], [loss for *_, loss in found], label=label, **style)
    killed_in, first = before[-1][2] + 1, after[0][2]
    ax.axvline(killed_in - 0.5, color=GREY, linestyle=":")
    ax.text(
        killed_in - 0.3,
        max(loss for *_, loss in before) / 2,
        f"SIGKILL of rank 1 in epoch {killed_in};\nback at epoch {first}, after the snapshot",
        va="top",
        fontsize=9,
    )
    ax.set(yscale="log", xlabel="epoch", xticks=range(0, len(uninterrupted) + 1, 2))
    ax.set_title("Training loss of 02 on two ranks: killed and resumed, or not, it is the same")
    ax.legend(frameon=False, fontsize=9)


def draw_shrink_and_grow(ax):
    lines = read(LOGS / "shrink_and_grow.log")
    found = epochs(lines)
    for ranks, colour, marker in ((4, BLUE, "o"), (2, ORANGE, "s")):
        mine = [(s, epoch) for s, n, epoch, _ in found if n == ranks]
        ax.plot(
            *zip(*mine, strict=True),
            marker,
            color=colour,
            markersize=5,
            label=f"{ranks} ranks on {ranks // 2} machine{'s' if ranks > 2 else ''}",
        )
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
        ax.text(
            14.5, y + 8.2, f"rank {rank}: a process, its GPU, its replica of the model", fontsize=9
        )
        arrow(ax, (11, 18), (16, y + 3.5), "->")
        box(ax, 16, y, 13, 7, images, "white", fontsize=8)
        box(ax, 30, y, 13, 7, "forward", SKY)
        for i, layers in enumerate(("upper layers", "middle layers", "lower layers")):
            box(
                ax,
                44 + 11.5 * i,
                y,
                11.5,
                7,
                f"backward:\n{layers}",
                BLUE,
                color="white",
                fontsize=8,
            )
        box(ax, 84, y, 14.5, 7, "optimizer.step()", GREEN, color="white", fontsize=9)
    for i in range(3):
        x = 55.5 + 11.5 * i
        arrow(ax, (x, 10.3), (x, 24.7), "<->", ORANGE)
        ax.text(x + 0.6, 17.5, f"bucket {i + 1}:\nall-reduce", fontsize=8, va="center")
    ax.text(
        93,
        17.5,
        "same gradients,\nsame step:\nequal replicas",
        ha="center",
        va="center",
        fontsize=9,
    )
    ax.text(30, 17.5, "gradients are averaged\nwhile backward goes on", fontsize=9, va="center")


def draw_six_parts(ax):
    """What two ranks do from start to end, and where they exchange something."""
    ax.set(xlim=(0, 100), ylim=(0, 34))
    ax.axis("off")
    parts = (  # what all do, what rank 0 does, what rank 1 does, exchanged in between, arrow
        ("start", "I am rank 0,\nGPU 0 is mine", "I am rank 1,\nGPU 1 is mine", "", ""),
        ("meet", "init_process\n_group", "init_process\n_group", "addresses", "<->"),
        ("share the data", "images\n0, 2, 4, ...", "images\n1, 3, 5, ...", "", ""),
        (
            "build the model,\nand wrap it",
            "Net(), then\nDDP(model)",
            "Net(), then\nDDP(model)",
            "rank 0's\nweights",
            "->",
        ),
        ("train", "every step;\nreport, save", "every step", "gradients\nin each step", "<->"),
        ("leave", "destroy_process\n_group", "destroy_process\n_group", "", ""),
    )
    for rank, y in ((0, 20), (1, 3)):
        ax.add_patch(plt.Rectangle((0, y - 1.5), 100, 9.5, facecolor="#EEEEEE"))
        ax.text(1, y + 3.2, f"rank {rank}", va="center")
        for i, part in enumerate(parts):
            colour = BLUE if part[3] else GREY
            box(ax, 8 + 15.3 * i, y, 14.5, 6.5, part[1 + rank], colour, color="white", fontsize=8)
    for i, (name, _, _, exchanged, style) in enumerate(parts):
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
            box(
                ax,
                left + 2 + 23 * local,
                11,
                22,
                13,
                f"rank {2 * node + local}\nlocal rank {local}\nGPU {local}",
                BLUE,
                color="white",
            )
    box(ax, 2, 2, 45, 6, "store, at MASTER_ADDR and MASTER_PORT", ORANGE)
    ax.text(
        53,
        5,
        "all four connect to the store on node1,\nand find each other's addresses there",
        va="center",
        fontsize=9,
    )


def draw_three_dimensions(ax):
    """A mesh of 2 x 2 x 2 as a cube: which ranks exchange something, and what."""
    ax.set(xlim=(0, 100), ylim=(0, 35))
    ax.axis("off")
    wide, high = 14, 6

    def corner(dp, pp, tp):
        """The lower left corner of a rank's box. dp goes to the back, pp right, tp down."""
        return 17 * dp + 34 * pp, 17 + 9 * dp - 16 * tp

    for a in (0, 1):
        for b in (0, 1):
            x, y = corner(a, b, 1)
            arrow(ax, (x + wide / 2, y + high), (x + wide / 2, y + 16), "<->", BLUE)
            x, y = corner(a, 0, b)
            arrow(ax, (x + wide, y + high / 2), (x + 34, y + high / 2), "<->", GREEN)
            x, y = corner(0, a, b)
            arrow(ax, (x + wide, y + high), (x + 17, y + 9), "<->", ORANGE)
            for dp in (0, 1):
                box(
                    ax,
                    *corner(dp, a, b),
                    wide,
                    high,
                    f"rank {4 * dp + 2 * a + b}\ndp {dp}, pp {a}, tp {b}",
                    GREY if dp else SKY,
                    color="white" if dp else "black",
                    fontsize=8,
                )
    ax.text(68, 33, "A mesh of eight ranks: dp 2, pp 2, tp 2", va="center")
    for y, colour, who, what in (
        (26, ORANGE, "dp: other rows, the same layers", "weights and gradients, once in each step"),
        (18, GREEN, "pp: the same rows, other layers", "activations, and their gradients back"),
        (10, BLUE, "tp: the same rows, parts of the layers", "activations, in each of them"),
    ):
        arrow(ax, (68, y - 2.5), (68, y + 2.5), "<->", colour)
        ax.text(69.5, y, f"{who}:\n{what}", va="center", fontsize=8)
    ax.text(
        68,
        3,
        "On two machines of four ranks, the blue\nones are on one: only dp crosses.",
        va="center",
        fontsize=8,
    )


# ---- Pictures that move ----

LIGHT, YELLOW, RED, INK = "#EEEEEE", "#F0E442", "#D55E00", "#111111"
FADE = 0.3  # seconds in which a part comes or goes


class Moving:
    """An SVG that plays in a loop, by CSS alone.

    Every part also has a look at rest: with hidden=True it is not there then. What is at rest is a
    whole picture. It is shown where nothing moves: to readers who asked their system for less
    motion, by a viewer that knows no animation, and by a browser that prints the file. The loop
    begins with its last two seconds, when all is there: a preview shows the first moment.
    """

    def __init__(self, title, description, height, seconds):
        self.title, self.description = title, description
        self.height, self.seconds = height, seconds
        self.parts, self.animations = [], {}

    def animated(self, frames):
        """The class of an animation: [(second, CSS)], from 0 to the end of the loop."""
        steps = "".join(f"{100 * second / self.seconds:.4g}%{{{css}}}" for second, css in frames)
        return self.animations.setdefault(steps, f"a{len(self.animations)}")

    def between(self, first, last=None, fade=FADE):
        """Frames of a part that comes at a second, and goes at another, or at the loop's end."""
        gone, here = "opacity:0", "opacity:1"
        last = self.seconds - FADE if last is None else last
        frames = [(0, gone), (first, gone), (first + fade, here)] if first else [(0, here)]
        return [*frames, (last, here), (last + FADE, gone), (self.seconds, gone)]

    def growing(self, first, last):
        """Frames of a part that grows from left to right."""
        none, whole = "transform:scaleX(0);opacity:1", "transform:scaleX(1);opacity:"
        return [
            (0, none),
            (first, none),
            (last, whole + "1"),
            (self.seconds - FADE, whole + "1"),
            (self.seconds, whole + "0"),
        ]

    def travelling(self, first, last, right, down, first_shown=None):
        """Frames of a part that moves between two seconds, and is gone where it arrives."""
        here, there = "transform:translate(0,0)", f"transform:translate({right}px,{down}px)"
        shown = first if first_shown is None else first_shown
        return [
            (0, f"opacity:0;{here}"),
            (shown, f"opacity:0;{here}"),
            (shown + FADE, f"opacity:1;{here}"),
            (first + FADE, f"opacity:1;{here}"),
            (last, f"opacity:1;{there}"),
            (last + 0.1, f"opacity:0;{there}"),
            (self.seconds, f"opacity:0;{there}"),
        ]

    def add(self, element, frames=None, hidden=False, grows=False):
        attributes = ' opacity="0"' if hidden else ""
        if frames:
            names = self.animated(frames) + (" grows" if grows else "")
            attributes += f' class="{names}"'
        self.parts.append(re.sub(r"^<\w+", rf"\g<0>{attributes}", element))

    def box(self, x, y, width, height, colour, edge="none", frames=None, **options):
        self.add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
            f' fill="{colour}" stroke="{edge}"/>',
            frames,
            **options,
        )

    def say(self, x, y, text, size=20, anchor="middle", frames=None, weight="", **options):
        """Text, with y in the middle of its capital letters."""
        style = f' text-anchor="{anchor}"' * (anchor != "start") + weight
        self.add(
            f'<text x="{x:g}" y="{y + 0.36 * size:g}" font-size="{size}"{style}>'
            f"{escape(text)}</text>",
            frames,
            **options,
        )

    def labelled(self, x, y, width, height, colour, text, frames=None, hidden=False, size=20):
        """A box and the text in its middle, which come and go together."""
        parts, self.parts = self.parts, []
        self.box(x, y, width, height, colour, edge=INK)
        self.say(x + width / 2, y + height / 2, text, size)
        both, self.parts = "".join(self.parts), parts
        self.add(f"<g>{both}</g>", frames, hidden)

    def arrow(self, points, frames=None, **options):
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.add(
            f'<path d="M{path}" fill="none" stroke="{GREY}" stroke-width="3"'
            ' marker-end="url(#head)"/>',
            frames,
            **options,
        )

    def captions(self, y, lines, at_rest):
        """[(second, text)]: each is there until the next; the one at rest is there by itself."""
        for (first, text), (last, _) in zip(lines, [*lines[1:], (None, "")], strict=True):
            until = None if last is None else last - FADE
            self.say(400, y, text, frames=self.between(first, until), hidden=True)
        self.say(400, y, at_rest, frames=[(0, "opacity:0"), (self.seconds, "opacity:0")])

    def text(self):
        keyframes = "".join(
            f"@keyframes {name}{{{steps}}}\n" for steps, name in self.animations.items()
        )
        used = "".join(f".{name}{{animation-name:{name}}}" for name in self.animations.values())
        loop = f"{self.seconds}s linear {2 - self.seconds}s infinite"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {self.height}"'
            f' width="800" height="{self.height}" role="img" aria-labelledby="title desc">\n'
            f'<title id="title">{escape(self.title)}</title>\n'
            f'<desc id="desc">{escape(self.description)}</desc>\n'
            f"<style>\ntext{{font-family:Helvetica,Arial,sans-serif;fill:{INK}}}\n"
            ".grows{transform-box:fill-box;transform-origin:0 0}\n"
            f"{keyframes}@media screen and (prefers-reduced-motion:no-preference){{\n"
            f"[class]{{animation:{loop}}}\n{used}\n}}\n</style>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5"'
            f' markerHeight="5" orient="auto"><path d="M0 0L10 5L0 10z" fill="{GREY}"/></marker>'
            f'</defs>\n<rect width="800" height="{self.height}" fill="white"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def section_of_04(name):
    """What rank 0 printed in a section of 04_collectives.py."""
    text = (LOGS / "04_collectives.txt").read_text().replace("[rank 0/4] ", "")
    return text.partition(f"\n== {name}\n")[2].partition("\n== ")[0]


def buckets():
    """One step of DDP, with the model and the buckets of 04's section ddp."""
    to_come = [int(n) for n in re.findall(r"gradients still to come: (\d+)", section_of_04("ddp"))]
    count, in_a_bucket = len(to_come), (to_come[0] - to_come[1]) // 2  # a layer: weight and bias
    layers = to_come[0] // 2 + in_a_bucket
    begin, forward, layer, travel, step, scale, left = 0.3, 1.2, 0.7, 1.3, 0.9, 74.5, 80
    full = [begin + forward + layer * in_a_bucket * (i + 1) for i in range(count)]
    back = full[-1] + travel
    picture = Moving(
        "One step of DDP: gradients travel while backward goes on",
        f"Two ranks compute forward, then backward from layer {layers} to layer 1. As soon as a"
        f" bucket holds the gradients of {in_a_bucket} layers, it is averaged over both ranks,"
        " while backward goes on. After the last bucket both take the same optimizer step.",
        height=430,
        seconds=12,
    )

    def x(second):
        return left + scale * (second - begin)

    def during(y, first, last, colour, text, edge="none"):
        width = x(last) - x(first) - 3
        picture.box(x(first), y, width, 46, "white", edge=GREY)
        picture.box(x(first), y, width, 46, colour, edge, picture.growing(first, last), grows=True)
        picture.say(x(first) + width / 2, y + 23, text)

    picture.say(400, 26, picture.title, 24)
    picture.say(x(begin + forward), 66, f"backward, from layer {layers} to layer 1", anchor="start")
    picture.say(x(back), 66, "optimizer", anchor="start")
    middle = 201
    for rank, y, tray, down in ((0, 84, 140, middle - 140), (1, 318, 274, middle - 274)):
        picture.say(4, y + 23, f"rank {rank}", anchor="start")
        during(y, begin, begin + forward, YELLOW, "forward")
        for i in range(layers):
            first = begin + forward + layer * i
            during(y, first, first + layer, SKY, f"{layers - i}")
        during(y, full[-1], back, LIGHT, "wait")
        during(y, back, back + step, GREEN, "step")
        right = scale * layer * in_a_bucket
        for leaves in full:
            picture.box(x(leaves) - right, tray - 4, right - 3, 42, LIGHT)
        for i, leaves in enumerate(full):
            first = x(leaves) - right
            edge, bar = (tray + 40, middle - 2) if rank == 0 else (tray - 6, middle + 48)
            picture.arrow([(x(leaves) - 24, edge), (x(leaves) + 6, bar)], picture.between(leaves))
            for j in range(in_a_bucket):
                there = leaves - layer * (in_a_bucket - j - 1)
                frames = picture.travelling(leaves, leaves + 0.7, right, down, there - FADE)
                picture.labelled(
                    first + right / in_a_bucket * j + 4,
                    tray,
                    41,
                    34,
                    ORANGE,
                    f"{layers - in_a_bucket * i - j}",
                    frames,
                    size=18,
                )
        picture.say(4, tray + 17, "bucket", anchor="start")
    picture.say(4, middle + 12, "all-", anchor="start")
    picture.say(4, middle + 34, "reduce", anchor="start")
    for i, leaves in enumerate(full):
        during(middle, leaves, leaves + travel, ORANGE, f"bucket {i + 1}")
    picture.captions(
        390,
        [
            (0, "Forward: each rank computes its own images."),
            (begin + forward, "Backward starts at the last layer. Its gradients go into a bucket."),
            (full[0], "Bucket 1 is full. It is averaged over both ranks while backward goes on."),
            (full[1], "The next buckets follow, and backward still goes on."),
            (full[-1], "Backward is done. Only the last bucket is waited for."),
            (back, "Both ranks have the same gradients, and take the same step."),
        ],
        "A full bucket is averaged over both ranks while backward goes on.",
    )
    picture.say(
        400, 417, f"Not to scale. {in_a_bucket} layers fill a bucket, as in 04_collectives.py.", 18
    )
    return picture


def ring_steps():
    """[step][rank][chunk]: the numbers that 04's section ring printed."""
    columns = []
    for block in re.split(r"\n {5,}(?=start|step)", "\n" + section_of_04("ring"))[1:]:
        rows = [re.findall(r"\[([\d ]+)\]", row) for row in re.findall(r"rank \d .*", block)]
        columns += zip(*rows, strict=True)
    return [[[int(n) for n in cell.split()] for cell in column] for column in columns]


def ring():
    """The ring all-reduce, step by step."""
    steps = ring_steps()
    size, last = len(steps[0]), steps[-1]
    path = [values[step % size][0] for step, values in enumerate(steps[:size])]
    grows = f"from {path[0]} to {', '.join(map(str, path[1:-1]))} and {path[-1]}"
    start, each = 1.2, 1.4
    picture = Moving(
        f"Ring all-reduce of {size} ranks, step by step",
        f"Each rank starts with {size} numbers. In steps 1 to {size - 1}, reduce-scatter, each rank"
        " sends one chunk to the next rank, which adds it to its own: the first chunk grows"
        f" {grows}. In steps {size} to {len(steps) - 1}, all-gather, the finished sums go round."
        f" Then every rank has"
        f" {', '.join(map(str, last[0]))}.",
        height=470,
        seconds=12,
    )
    corners = [(20, 56), (470, 56), (470, 246), (20, 246)]  # clockwise
    ways = [(450, 0), (0, 190), (-450, 0), (0, -190)]
    picture.say(400, 28, picture.title, 24)
    for ends in (
        [(334, 112), (464, 112)],
        [(625, 172), (625, 240)],
        [(466, 302), (336, 302)],
        [(175, 240), (175, 172)],
    ):
        picture.arrow(ends)
    for rank, (x, y) in enumerate(corners):
        picture.box(x, y, 310, 112, LIGHT)
        picture.say(x + 14, y + 22, f"rank {rank}", anchor="start", weight=' font-weight="bold"')
        numbers = " ".join(map(str, steps[0][rank]))
        picture.say(x + 296, y + 22, f"start: {numbers}", 18, anchor="end")
        for chunk in range(size):
            cell = (x + 14 + 71 * chunk, y + 44, 68, 56)
            picture.labelled(*cell, "white", str(steps[0][rank][chunk]), size=26)
            for number in range(1, len(steps)):
                value = steps[number][rank][chunk]
                if value != steps[number - 1][rank][chunk]:
                    colour = SKY if value == last[rank][chunk] else YELLOW
                    frames = picture.between(start + each * (number - 1) + 0.95, fade=0.1)
                    picture.labelled(*cell, colour, str(value), frames, size=26)
    for number in range(1, len(steps)):
        begin = start + each * (number - 1)
        for rank, ((x, y), way) in enumerate(zip(corners, ways, strict=True)):
            other, before = (rank + 1) % size, steps[number - 1]
            [chunk] = [c for c in range(size) if before[other][c] != steps[number][other][c]]
            sent, arrives = before[rank][chunk], steps[number][other][chunk]
            arrives -= before[other][chunk] if number < size else 0
            if sent != arrives:
                raise ValueError(f"step {number}: rank {rank} sends {sent}, and {arrives} arrives")
            picture.labelled(
                x + 14 + 71 * chunk + 4,
                y + 50,
                60,
                44,
                ORANGE,
                f"+{sent}" if number < size else str(sent),
                picture.travelling(begin, begin + 0.95, *way),
                True,
                24,
            )
        picture.say(
            400,
            208,
            f"step {number} of {len(steps) - 1}",
            24,
            hidden=True,
            frames=picture.between(begin, begin + each - FADE),
        )
    for x, colour, text in (
        (24, "white", "its own number"),
        (248, YELLOW, "sum so far"),
        (430, SKY, "finished sum"),
        (632, ORANGE, "on its way"),
    ):
        picture.box(x, 376, 24, 20, colour, edge=INK)
        picture.say(x + 32, 386, text, anchor="start")
    picture.say(
        400,
        208,
        f"{len(steps) - 1} steps",
        24,
        frames=[(0, "opacity:0"), (picture.seconds, "opacity:0")],
    )
    middle, end = start + each * (size - 1), start + each * (len(steps) - 1)
    picture.captions(
        418,
        [
            (0, "Each rank has numbers of its own. All ranks want the sums."),
            (
                start,
                f"Steps 1 to {size - 1}, reduce-scatter: each rank sends one chunk to the next,",
            ),
            (
                middle,
                f"Steps {size} to {len(steps) - 1}, all-gather: each rank passes a finished sum",
            ),
            (end, f"Done: every rank has the sums {' '.join(map(str, last[0]))}."),
        ],
        f"Steps 1 to {size - 1}, reduce-scatter: the first chunk grows {grows}.",
    )
    picture.captions(
        446,
        [
            (start, "which adds it to its own."),
            (middle, "on to the next, which keeps it."),
            (end, "Each rank sent to one other rank only."),
        ],
        f"Steps {size} to {len(steps) - 1}, all-gather: the finished sums go round.",
    )
    return picture


def kill():
    """The README's job: a rank is killed, both start again, and nothing is lost but an epoch."""
    lines = [(0, line) for line in (LOGS / "main_job.txt").read_text().splitlines()]
    [crash] = [i for i, (_, line) in enumerate(lines) if "crash on purpose" in line]
    dead = int(re.match(r"\[rank (\d)/2\]", lines[crash][1])[1])
    other = 1 - dead
    done = [epoch for _, _, epoch, _ in epochs(lines[:crash])]
    again = [epoch for _, _, epoch, _ in epochs(lines[crash:])]
    text = "\n".join(line for _, line in lines)
    [resumed] = map(int, re.findall(r"resumed .* epoch (\d+)", text))
    saved = [int(epoch) for epoch in re.findall(r"epoch +(\d+)/.*\| saved", text)]
    whole = read(LOGS / "main_job_not_killed.log")
    uninterrupted = [epoch for _, _, epoch, _ in epochs(whole)]
    sums = [
        re.findall(r"identical, sha256 (\w+)", "\n".join(line for _, line in found))
        for found in (lines, whole)
    ]
    lost = done[-1] + 1
    if (
        sums[0] != sums[1]
        or len(sums[0]) != 1
        or resumed != again[0]
        or saved != done + again
        or done + again != uninterrupted
    ):
        sys.exit(f"draw.py: error: {sums}, {done}, {again}, {uninterrupted}: not one story")
    [checksum] = sums[0]

    left, wide, each, begin = 138, 66, 0.65, 0.4
    picture = Moving(
        f"Rank {dead} is killed, and the job goes on from its snapshot",
        f"Two ranks train, and save a snapshot after each epoch. Rank {dead} is killed in epoch"
        f" {lost}. Rank {other} ends too, and torchrun starts both again. They load the snapshot of"
        f" epoch {resumed - 1}, repeat epoch {resumed}, and end with the checksum {checksum}, as a"
        " run does that was not killed.",
        height=390,
        seconds=12,
    )

    def epoch_box(y, x, width, first, last, colour, text):
        picture.box(x, y, width - 3, 44, "white", edge=GREY)
        picture.box(x, y, width - 3, 44, colour, frames=picture.growing(first, last), grows=True)
        picture.say(x + (width - 3) / 2, y + 22, text, 22)

    killed = begin + each * (len(done) + 1)
    restart = left + wide * (len(done) + 1) + 166  # where both start again
    ended, started = killed + 1.2, killed + 2.5
    loaded = started + 1.2
    resume = loaded + 0.8
    end = resume + each * len(again)
    picture.say(400, 28, picture.title, 24)
    for rank, y in ((0, 58), (1, 108)):
        picture.say(8, y + 22, f"rank {rank}", anchor="start")
        for i, epoch in enumerate(done):
            epoch_box(
                y, left + wide * i, wide, begin + each * i, begin + each * (i + 1), SKY, f"{epoch}"
            )
        stop = left + wide * len(done)
        epoch_box(y, stop, wide, killed - each, killed, LIGHT, f"{lost}")
        frames = picture.between(killed if rank == dead else ended)
        x = stop + wide + 5
        if rank == dead:
            cross = f"M{x:g} {y + 14}l16 16m-16 0l16 -16"
            picture.add(f'<path d="{cross}" stroke="{RED}" stroke-width="5"/>', frames)
        else:
            picture.box(x, y + 14, 16, 16, INK, frames=frames)
        for i, epoch in enumerate(again):
            epoch_box(
                y,
                restart + wide * i,
                wide,
                resume + each * i,
                resume + each * (i + 1),
                ORANGE if epoch == lost else SKY,
                f"{epoch}",
            )
    for i, (second, text) in enumerate(
        (
            (ended, "torchrun"),
            (ended, "ends the rest,"),
            (started, "starts both"),
            (started, "again"),
        )
    ):
        picture.say(restart - 69, 66 + 25 * i, text, 18, frames=picture.between(second))
    picture.say(8, 188, "snapshots", anchor="start")
    ends = [(left + wide * (i + 1), begin + each * (i + 1)) for i in range(len(done))]
    ends += [(restart + wide * (i + 1), resume + each * (i + 1)) for i in range(len(again))]
    for epoch, (x, second) in zip(saved, ends, strict=True):
        picture.labelled(x - 37, 170, 34, 36, GREEN, f"{epoch}", picture.between(second))
    taken = left + wide * (resumed - 1)
    picture.arrow([(taken, 188), (restart + 12, 188), (restart + 12, 156)], picture.between(loaded))
    picture.say((taken + restart) / 2, 176, "load", 18, frames=picture.between(loaded))
    picture.say(8, 278, "never killed", anchor="start")
    for i, epoch in enumerate(uninterrupted):
        epoch_box(
            256, left + wide * i, wide, begin + each * i, begin + each * (i + 1), SKY, f"{epoch}"
        )
    last = restart + wide * len(again) - 3
    for y, second in ((232, end), (278, begin + each * len(uninterrupted))):
        frames = picture.between(second)
        picture.box(last - 160, y - 18, 160, 36, "white", GREEN, frames)
        picture.say(last - 80, y, checksum, frames=frames)
    picture.say(
        last - 170, 232, "checksum of the weights", anchor="end", frames=picture.between(end)
    )
    picture.captions(
        334,
        [
            (0, "Two ranks train, and save a snapshot after each epoch."),
            (killed, f"Rank {dead} is killed at the end of epoch {lost}, before it is saved."),
            (ended, f"Rank {other} cannot go on alone. torchrun ends what is left."),
            (started, "torchrun starts both ranks again."),
            (loaded, f"They load the snapshot of epoch {lost - 1}, and repeat epoch {lost}."),
            (end, "They end with the weights of a run that was never killed."),
        ],
        "The killed job ends with the weights of a run that was never killed.",
    )
    picture.say(400, 366, "Numbers are epochs, orange is repeated. Not to scale.", 18)
    return picture


STILL = {
    "ddp": [draw_ddp],
    "six_parts": [draw_six_parts],
    "ranks": [draw_ranks],
    "kill_and_resume": [draw_kill_and_resume, "uninterrupted.log", "killed.log"],
    "shrink_and_grow": [draw_shrink_and_grow, "shrink_and_grow.log"],
    "three_dimensions": [draw_three_dimensions],
}
MOVING = {"buckets": buckets, "ring": ring, "kill": kill}


def source(*logs):
    """What a picture says of the logs that it was drawn from, for the test that compares them."""
    digest = hashlib.sha256(b"".join((LOGS / name).read_bytes() for name in logs)).hexdigest()
    return f"drawn from {' and '.join(logs) or 'no log'}, sha256 {digest}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--redraw", action="store_true", help="draw the logs that are there")
    args = parser.parse_args()
    if not args.redraw:
        run_kill_and_resume()
        run_shrink_and_grow()
    for name, (draw, *logs) in STILL.items():
        figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
        draw(ax)
        metadata = {"Date": None, "Description": source(*logs)}
        figure.savefig(HERE / f"{name}.svg", facecolor="white", metadata=metadata)
        print(f"drawn: {HERE.name}/{name}.svg")
    for name, draw in MOVING.items():
        (HERE / f"{name}.svg").write_text(draw().text())
        print(f"drawn: {HERE.name}/{name}.svg")


if __name__ == "__main__":
    main()
