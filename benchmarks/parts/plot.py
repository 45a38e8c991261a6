"""Draw results of the benchmarks as SVG, beside the JSON they come from.

    python benchmarks/parts/plot.py                        # all in benchmarks/results
    python benchmarks/parts/plot.py benchmarks/results/throughput-cpu.json

Needs matplotlib: pip install -r requirements-dev.txt
"""

import hashlib
import json
import pathlib
import sys
from statistics import median

import matplotlib

RESULTS = pathlib.Path(__file__).parent.parent / "results"
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

# Told apart by colour-blind readers, too: Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, YELLOW, SKY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
    "#56B4E9",
)
GREY = "#999999"


def draw(path):
    """Draw the results in a JSON file; return the paths of the pictures, NAME.svg beside it."""
    result = json.loads(pathlib.Path(path).read_text())
    for table in result["tables"]:
        table["rows"] = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    pictures = []
    for suffix, figure in DRAW[result["benchmark"]](result).items():
        figure.text(0.01, 0.01, result["caption"], fontsize=8, color="#555555")
        picture = pathlib.Path(path).with_suffix("").as_posix() + f"{suffix}.svg"
        metadata = {"Date": None, "Description": source(path)}
        figure.savefig(picture, facecolor="white", metadata=metadata)
        plt.close(figure)
        print(f"drawn: {picture}")
        pictures.append(pathlib.Path(picture))
    return pictures


def source(path):
    """What a picture says of the file that it was drawn from, for the test that compares them."""
    path = pathlib.Path(path)
    return f"drawn from {path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def find_table(result, title):
    """The only table whose title begins so; its rows are dicts, by column."""
    [table] = [table for table in result["tables"] if table["title"].startswith(title)]
    return table


def column(rows, name):
    return [row[name] for row in rows]


def new_figure(panels, height, rows=1):
    """A figure 10 inches wide with panels in rows, and room for the caption below."""
    figure, axes = plt.subplots(rows, panels // rows, figsize=(10, height), squeeze=False)
    figure.set_layout_engine("constrained", rect=(0, 0.25 / height, 1, 1 - 0.25 / height))
    return figure, axes.flatten()


def bars(ax, names, values, least, most, form, colour):
    """Horizontal bars of the medians, from the top, with these written and their ranges drawn."""
    drawn = ax.barh(
        range(len(names)),
        values,
        color=[colour(name) for name in names],
        xerr=distances(values, least, most),
        error_kw={"elinewidth": 1},
    )
    ax.bar_label(drawn, [form(value) for value in values], padding=3)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlim(0, max(most) * 1.25)


def distances(values, least, most):
    """How far a range goes down and up from each value, as matplotlib wants it."""
    return [
        [v - low for v, low in zip(values, least, strict=True)],
        [high - v for v, high in zip(values, most, strict=True)],
    ]


def stacked(ax, rows, parts):
    """Horizontal bars: one of each script, from the parts, which are columns in seconds."""
    coloured = list(zip(parts, (GREY, BLUE, SKY, GREEN, YELLOW, ORANGE), strict=False))
    for index, row in enumerate(rows):
        left = 0
        for part, colour in coloured:
            ax.barh(index, row[part], left=left, color=colour, edgecolor="white", linewidth=0.5)
            left += row[part]
        ax.text(left, index, f" {left:.1f} s", va="center")
    for part, colour in coloured:
        ax.barh(0, 0, color=colour, label=part)
    ax.set_yticks(range(len(rows)), column(rows, "script"))
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("seconds")
    ax.legend(
        ncols=len(parts),
        loc="lower left",
        bbox_to_anchor=(0, 1.08),
        frameon=False,
        fontsize=8,
        handlelength=1,
        columnspacing=1,
        borderaxespad=0,
    )


def draw_throughput(result):
    tables = [table for table in result["tables"] if len(table["rows"]) > 1]
    in_two_rows = len(tables) % 2 == 0
    figure, axes = new_figure(len(tables), 4.2 if in_two_rows else 3.2, 1 + in_two_rows)
    for ax, table in zip(axes, tables, strict=True):
        bars(
            ax,
            *(column(table["rows"], name) for name in ("loop", "images/s", "least", "most")),
            lambda v: f"{v:,.0f}",
            lambda name: {"02": BLUE, "limit: no input": GREY}.get(name, ORANGE),
        )
        ax.set_title(table["title"])
        ax.set_xticks([])
    figure.suptitle("Images a second, all ranks together: median, least to most", x=0.01, ha="left")
    return {"": figure}


def draw_scaling(result):
    figure, [left, right] = new_figure(2, 3.8)
    styles = [(BLUE, "o-"), (ORANGE, "s-"), (RED, "v:"), (GREEN, "^-")]
    places = result["settings"]["cores or GPUs"]
    several = [
        (table["title"].partition(":")[0], table["rows"])
        for table in result["tables"]
        if "efficiency" in table["columns"] and len(table["rows"]) > 1
    ]
    for index, ((title, rows), (colour, style)) in enumerate(zip(several, styles, strict=False)):
        at = [row["ranks"] + 0.05 * (index - 1.5) for row in rows]  # beside each other
        for ax, ideal in ((left, [1] * len(rows)), (right, column(rows, "ideal"))):
            values, least, most = (
                [row[name] / n for row, n in zip(rows, ideal, strict=True)]
                for name in ("times one rank", "times, from", "to")
            )
            ax.errorbar(
                at,
                values,
                distances(values, least, most),
                fmt=style,
                color=colour,
                elinewidth=1,
                label=title,
            )
    ranks = column(several[0][1], "ranks")
    left.plot(ranks, [min(n, places) for n in ranks], "--", color=GREY, label="ideal")
    right.plot(ranks, [1] * len(ranks), "--", color=GREY, label="ideal")
    left.set_title(f"Times the speed of one rank, least to most ({places} cores or GPUs)")
    right.set_title("Efficiency: of the ideal")
    for ax in (left, right):
        ax.set_xticks(ranks)
        ax.set_xlabel("ranks")
        ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
    left.legend(frameon=False, fontsize=8, loc="lower right")
    return {"": figure}


def draw_ddp_anatomy(result):
    figures = result["figures"]
    timeline, [ax] = new_figure(1, 2.6)
    lanes = {"forward": 0, "backward": 0, "optimizer": 0, "layers": 1, "all_reduce": 2}
    colours = {
        "forward": SKY,
        "backward": BLUE,
        "optimizer": GREY,
        "layers": BLUE,
        "all_reduce": ORANGE,
    }
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
            ax.text((begin + end) / 2, y, text, ha="center", va="center", color="white", fontsize=8)
    ax.margins(x=0.06)
    ax.set_yticks([0, 1, 2], ["step", "backward of the layers", "all-reduce of buckets"])
    ax.invert_yaxis()
    ax.set_xlabel("ms")
    ax.set_title("One step of DDP: the first buckets travel while lower layers are computed")
    return {"-timeline": timeline}


def draw_collectives(result):
    tables = [table for table in result["tables"] if table["title"].endswith("ms of a call")]
    titles = [table["title"].partition(",")[0] for table in tables]
    figure, [left, right] = new_figure(2, 3.8)
    styles = {
        "broadcast": (GREY, "v-"),
        "all_gather": (GREEN, "^-"),
        "reduce_scatter": (YELLOW, "s-"),
        "all_reduce": (BLUE, "o-"),
        "ring of 04": (ORANGE, "D:"),
    }
    for name, (colour, style) in styles.items():
        rows = [row for table in tables for row in table["rows"] if row["operation"] == name]
        middles, least, most = (column(rows, part) for part in ("ms", "least", "most"))
        left.errorbar(
            titles,
            middles,
            distances(middles, least, most),
            fmt=style,
            color=colour,
            label=name,
            markersize=4,
            elinewidth=1,
        )
        right.plot(titles, column(rows, "bus, GB/s"), style, color=colour, markersize=4)
    left.set_yscale("log")
    left.set_title("ms of a call: median, least to most")
    right.set_title("bus bandwidth, GB/s: of the medians")
    for ax in (left, right):
        ax.tick_params("x", labelrotation=45)
    left.legend(frameon=False, fontsize=8)
    return {"": figure}


def draw_network(result):
    sweeps, axes = new_figure(3, 3.6)
    ddp, colours = result["figures"]["ddp"], (BLUE, GREEN, ORANGE, RED)
    parts = ["no exchange", "exchange after backward", "exchange during backward"]
    for index, ((rate, sides), colour) in enumerate(zip(ddp.items(), colours, strict=False)):
        ranges(
            axes[0],
            [place + 0.25 * (index - 1) for place in range(3)],
            [sides[part] for part in parts],
            colour,
            rate,
            "o",
        )
        found = {float(name.split()[2]): ms for name, ms in sides.items() if "buckets" in name}
        ranges(axes[1], list(found), list(found.values()), colour, rate, "o-")
        found = {int(name.split()[0]): ms for name, ms in sides.items() if "one exchange" in name}
        found = {1: sides["exchange during backward"]} | found
        ranges(axes[2], list(found), list(found.values()), colour, rate, "o-")
    axes[0].set_xticks(range(3), ["none", "after\nbackward", "during\nbackward"])
    axes[0].set_title("the exchange: a batch, ms")
    axes[1].set_title("bucket size: a batch, ms")
    axes[2].set_title("batches an exchange: a batch, ms")
    for ax, name in ((axes[1], "MiB"), (axes[2], "batches")):
        ticks = sorted({x for line in ax.get_lines() for x in line.get_xdata()})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{n:g}" for n in ticks])
        ax.minorticks_off()
        ax.set_xlabel(name)
    for ax in axes:
        ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
    axes[0].legend(frameon=False, fontsize=8, loc="upper left", ncols=3, columnspacing=1)

    model = find_table(result, "the model: ")["rows"]
    line = find_table(result, "the model's line")["rows"]
    growth, [left, right] = new_figure(2, 3.6)
    for kilobytes, colour in zip(sorted(set(column(model, "kB"))), colours, strict=False):
        rows = [row for row in model if row["kB"] == kilobytes]
        counts = [int(row["machines"].split(",")[0]) for row in rows]
        measured, least, most = (column(rows, name) for name in ("ms", "least", "most"))
        left.errorbar(
            counts,
            measured,
            distances(measured, least, most),
            fmt="o",
            color=colour,
            label=f"{kilobytes:g} kB",
        )
        left.plot(counts, column(rows, "model"), ":", color=colour)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="machines",
        title=("all-reduce, ms; dotted: the model, fitted on 2 and 4"),
    )
    left.set_xticks(counts, [str(n) for n in counts])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8, loc=(0.02, 0.55))
    measured = find_table(result, "machines at")["rows"]
    right.plot(
        column(measured, "machines"),
        column(measured, "efficiency"),
        "o-",
        color=BLUE,
        label="measured",
    )
    right.plot(
        column(line, "machines"),
        column(line, "efficiency"),
        "s:",
        color=GREY,
        label="the model's line, not measured",
    )
    ticks = column([*measured, *line], "machines")
    right.set_xscale("log", base=2)
    right.set_xticks(ticks, [str(n) for n in ticks])
    right.minorticks_off()
    right.set_ylim(0, 1.05)
    right.set_xlabel("machines")
    right.set_title("efficiency: computation's part of a step")
    right.legend(frameon=False, fontsize=8)
    return {"-ddp": sweeps, "-growth": growth}


def ranges(ax, places, values, colour, label, style):
    """Medians of lists of values, and lines from the least to the most."""
    middles, least, most = (list(map(part, values)) for part in (median, min, max))
    ax.errorbar(
        places,
        middles,
        distances(middles, least, most),
        fmt=style,
        color=colour,
        label=label,
        markersize=4,
    )


def draw_recovery(result):
    figure, [ax] = new_figure(1, 2.8)
    stacked(
        ax,
        find_table(result, "from SIGKILL")["rows"],
        ["noticing", "restart", "imports", "joining", "loading", "first step"],
    )
    figure.suptitle("From SIGKILL of one of two ranks to the next trained step", x=0.01, ha="left")
    snapshots, [ax] = new_figure(1, 3)
    rows = find_table(result, "a snapshot")["rows"]
    sizes = [float(row["snapshot"].split()[0]) for row in rows]
    for time, label, style, colour in (
        ("seconds", "written as 02 does", "o-", BLUE),
        ("copy, s", "copied, to be written later", "s-", ORANGE),
    ):
        ax.plot(sizes, column(rows, time), style, color=colour, label=label)
    ax.set(xscale="log", yscale="log", xlabel="MB", ylabel="seconds")
    ax.set_title("How long training stands still for a snapshot")
    ax.legend(frameon=False)
    return {"": figure, "-snapshots": snapshots}


def draw_startup(result):
    figure, [ax] = new_figure(1, 3.2)
    stacked(
        ax,
        find_table(result, "to the first")["rows"],
        ["launcher", "imports", "joining", "model", "first step"],
    )
    figure.suptitle("From the command to the first trained step, two ranks", x=0.01, ha="left")
    return {"": figure}


def draw_watching(result):
    figure, [ax] = new_figure(1, 2.4)
    rows = find_table(result, "a step")["rows"]
    bars(
        ax,
        *(column(rows, name) for name in ("a step", "times if watched", "from", "to")),
        lambda v: f"{v:.2f}",
        lambda name: BLUE,
    )
    ax.axvline(1, color="#555555", linestyle="--")
    figure.suptitle("A step watched by check_training, in times one that is not", x=0.01, ha="left")
    return {"": figure}


DRAW = {
    "throughput": draw_throughput,
    "scaling": draw_scaling,
    "ddp_anatomy": draw_ddp_anatomy,
    "collectives": draw_collectives,
    "network": draw_network,
    "recovery": draw_recovery,
    "startup": draw_startup,
    "watching": draw_watching,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(RESULTS.glob("*.json")):
        draw(name)
