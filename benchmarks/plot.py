"""Draw results of the benchmarks as SVG, beside the JSON they come from.

    python benchmarks/plot.py                                        # all in benchmarks/results
    python benchmarks/plot.py benchmarks/results/throughput-cpu.json

Needs matplotlib: pip install -r benchmarks/requirements.txt
"""

import json
import pathlib
import sys
from statistics import median

import matplotlib
from common import RESULTS, caption

matplotlib.use("svg")
matplotlib.rcParams |= {
    "svg.hashsalt": "the same names in every file", "font.size": 10, "axes.titlesize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
}  # fmt: skip
from matplotlib import pyplot as plt

# Told apart by colour-blind readers, too: Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, YELLOW, SKY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442", "#56B4E9")  # fmt: skip
GREY = "#999999"


def draw(path):
    """Draw the results in a JSON file; return the paths of the pictures, NAME.svg beside it."""
    result = json.loads(pathlib.Path(path).read_text())
    pictures = []
    for suffix, figure in DRAW[result["benchmark"]](result).items():
        figure.text(0.01, 0.01, caption(result["machine"]), fontsize=8, color="#555555")
        picture = pathlib.Path(path).with_suffix("").as_posix() + f"{suffix}.svg"
        figure.savefig(picture, facecolor="white", metadata={"Date": None})
        plt.close(figure)
        print(f"drawn: {picture}")
        pictures.append(pathlib.Path(picture))
    return pictures


def new_figure(panels, height, rows=1):
    """A figure 10 inches wide with panels in rows, and room for the caption below."""
    figure, axes = plt.subplots(rows, panels // rows, figsize=(10, height), squeeze=False)
    figure.set_layout_engine("constrained", rect=(0, 0.25 / height, 1, 1 - 0.25 / height))
    return figure, axes.flatten()


def bars(ax, rows, form, colour):
    """Horizontal bars of [(name, value)], from the top, with the values at their ends."""
    names, values = zip(*rows, strict=True)
    drawn = ax.barh(range(len(rows)), values, color=[colour(name) for name in names])
    ax.bar_label(drawn, [form(value) for value in values], padding=3)
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set_xlim(0, max(values) * 1.25)


def stacked(ax, rows, parts):
    """Horizontal bars of [(name, [value of each of parts, as far as it goes])]."""
    for index, (name, values) in enumerate(rows):
        left = 0
        for value, colour in zip(values, (GREY, BLUE, SKY, GREEN, YELLOW, ORANGE, RED),
                                 strict=False):
            ax.barh(index, value, left=left, color=colour, edgecolor="white", linewidth=0.5)
            left += value
        ax.text(left, index, f" {left:.1f} s", va="center")
    for part, colour in zip(parts, (GREY, BLUE, SKY, GREEN, YELLOW, ORANGE, RED), strict=False):
        ax.barh(0, 0, color=colour, label=part)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("seconds")
    ax.legend(ncols=len(parts), loc="lower left", bbox_to_anchor=(0, 1.08), frameon=False,
              fontsize=8, handlelength=1, columnspacing=1, borderaxespad=0)


def draw_throughput(result):
    tables = [table for table in result["tables"] if len(table["rows"]) > 1]
    in_two_rows = len(tables) % 2 == 0
    figure, axes = new_figure(len(tables), 4.2 if in_two_rows else 3.2, 1 + in_two_rows)
    for ax, table in zip(axes, tables, strict=True):
        rows = [(name, speed) for name, speed, _ in table["rows"]]
        bars(ax, rows, lambda v: f"{v:,.0f}",
             lambda name: {"02": BLUE, "limit: no input": GREY}.get(name, ORANGE))
        ax.set_title(table["title"])
        ax.set_xticks([])
    figure.suptitle("Images a second, all ranks together", x=0.01, ha="left")
    return {"": figure}


def draw_scaling(result):
    figure, [left, right] = new_figure(2, 3.8)
    styles = [(BLUE, "o-"), (ORANGE, "s-"), (RED, "v:"), (GREEN, "^-")]
    places = result["settings"]["cores or GPUs"]
    several = [(table["title"].partition(":")[0], table["rows"]) for table in result["tables"]
               if "efficiency" in table["columns"] and len(table["rows"]) > 1]
    for (title, rows), (colour, style) in zip(several, styles, strict=False):
        ranks = [row[0] for row in rows]
        left.plot(ranks, [row[2] for row in rows], style, color=colour, label=title)
        right.plot(ranks, [row[4] for row in rows], style, color=colour, label=title)
    ranks = [row[0] for row in several[0][1]]
    left.plot(ranks, [min(n, places) for n in ranks], "--", color=GREY, label="ideal")
    right.plot(ranks, [1] * len(ranks), "--", color=GREY, label="ideal")
    left.set_title(f"Times the speed of one rank ({places} cores or GPUs)")
    right.set_title("Efficiency: of the ideal")
    for ax in (left, right):
        ax.set_xticks(ranks)
        ax.set_xlabel("ranks")
        ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
    left.legend(frameon=False, fontsize=8)
    return {"": figure}


def draw_ddp_anatomy(result):
    figures = result["figures"]
    timeline, [ax] = new_figure(1, 2.6)
    lanes = {"forward": 0, "backward": 0, "optimizer": 0, "layers": 1, "all_reduce": 2}
    colours = {"forward": SKY, "backward": BLUE, "optimizer": GREY, "layers": BLUE,
               "all_reduce": ORANGE}
    bucket = 0
    for lane, begin, end in figures["timeline"]:
        y, height, text = lanes[lane], 0.8, lane if lanes[lane] == 0 else ""
        if lane == "all_reduce":  # above and below by turns, as two may be under way
            bucket += 1
            y, height, text = y + (0.2 if bucket % 2 == 0 else -0.2), 0.4, str(bucket)
        ax.barh(y, end - begin, height, left=begin, color=colours[lane], edgecolor="white")
        if lane == "optimizer":
            ax.text(end, y, f" {lane}", va="center", fontsize=8)
        else:
            ax.text((begin + end) / 2, y, text, ha="center", va="center", color="white",
                    fontsize=8)
    ax.margins(x=0.06)
    ax.set_yticks([0, 1, 2], ["step", "backward of the layers", "all-reduce of buckets"])
    ax.invert_yaxis()
    ax.set_xlabel("ms")
    ax.set_title("One step of DDP: the first buckets travel while lower layers are computed")
    sweeps, axes = new_figure(3, 3.4)
    overlap = [(name, median(values)) for name, values in figures["overlap"].items()]
    bars(axes[0], overlap, lambda v: f"{v:.0f}",
         lambda name: BLUE if name.startswith("all") else SKY)
    axes[0].set_title("parts of a step, ms")
    axes[0].set_xticks([])
    batches = {int(n): median(values) / int(n) for n, values in figures["no_sync"].items()}
    sizes = {int(n): median(values) for n, values in figures["buckets"].items()}
    for ax, found, name, title in ((axes[1], sizes, "MiB", "bucket size: a step, ms"),
                                   (axes[2], batches, "batches", "no_sync: a batch, ms")):
        ax.plot(list(found), list(found.values()), "o-", color=BLUE)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(found), [str(n) for n in found])
        ax.minorticks_off()
        ax.set_ylim(0, 1.15 * max(found.values()))
        ax.set_xlabel(name)
        ax.set_title(title)
    return {"-timeline": timeline, "-sweeps": sweeps}


def draw_recovery(result):
    figure, [ax] = new_figure(1, 2.8)
    columns, rows = result["tables"][0]["columns"], result["tables"][0]["rows"]
    stacked(ax, [(row[0], [v for v in row[2:] if v is not None]) for row in rows], columns[2:])
    figure.suptitle("From SIGKILL of one of two ranks to the next trained step", x=0.01,
                    ha="left")
    snapshots, [ax] = new_figure(1, 3)
    rows = result["tables"][1]["rows"]
    sizes = [float(row[0].split()[0]) for row in rows]
    for column, label, style, colour in ((1, "written as 02 does", "o-", BLUE),
                                         (5, "copied, to be written later", "s-", ORANGE)):
        ax.plot(sizes, [row[column] for row in rows], style, color=colour, label=label)
    ax.set(xscale="log", yscale="log", xlabel="MB", ylabel="seconds")
    ax.set_title("How long training stands still for a snapshot")
    ax.legend(frameon=False)
    return {"": figure, "-snapshots": snapshots}


def draw_startup(result):
    figure, [ax] = new_figure(1, 3.2)
    [table] = result["tables"]
    stacked(ax, [(row[0], row[3:]) for row in table["rows"]], table["columns"][3:])
    figure.suptitle("From the command to the first trained step, two ranks", x=0.01, ha="left")
    return {"": figure}


DRAW = {
    "throughput": draw_throughput,
    "scaling": draw_scaling,
    "ddp_anatomy": draw_ddp_anatomy,
    "recovery": draw_recovery,
    "startup": draw_startup,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(RESULTS.glob("*.json")):
        draw(name)
