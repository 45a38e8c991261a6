"""Draws some steps of all ranks as an SVG."""

from dataclasses import dataclass

from .records.times import StepTimes

COLOURS = {
    "loading": "#5fa55a",
    "forward": "#4f8fd0",
    "backward": "#1f4e8c",
    "exchange": "#f0b64a",
    "collective": "#e0813a",
    "optimizer": "#8461a8",
    "saving": "#b5473c",
}
NAMES = {name: name for name in COLOURS} | {
    "exchange": "waiting and exchange in backward()",
    "collective": "collective calls",
}
SHOWN = 4  # steps
WIDTH, LEFT, ROW = 860, 80, 34  # of the time axis, where it begins, of a rank


@dataclass(slots=True)
class Window:
    """Some steps that are shown, on one clock."""

    steps: dict[int, dict[int, StepTimes]]  # {rank: {step: StepTimes}}, as times.aligned()
    shown: list[int]  # numbers of the steps
    begin: float  # seconds, as time
    end: float

    def place(self, seconds):
        """Return the place of a moment on the time axis."""
        return LEFT + self.length(seconds - self.begin)

    def length(self, seconds):
        """Return how long so many seconds are in the picture."""
        return WIDTH / (self.end - self.begin) * seconds

    @property
    def height(self):
        """Of the rows of all ranks."""
        return ROW * len(self.steps)


def draw(steps_of_ranks):
    """Return an SVG: some steps around the median, a row for each rank, one clock.

    steps_of_ranks: {rank: {step: StepTimes}}, as times.aligned() returns it. None comes back if the
    ranks have not noted two steps in a row.
    """
    window = around_the_median(steps_of_ranks)
    if window is None:
        return None
    high = window.height + 110
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {high}" font-size="13"'
        f' font-family="sans-serif"><rect width="960" height="{high}" fill="white"/>'
    )
    lines = [begin]
    for number, (rank, steps) in enumerate(sorted(steps_of_ranks.items())):
        lines += row_of(window, ROW * number, rank, steps)
    lines += axis_of(window)
    lines += legend_of(window.height)
    lines.append(
        f'<text x="80" y="{window.height + 98}">steps {window.shown[0] + 1} to'
        f" {window.shown[-1] + 1}; a black line ends a step; grey: none of these</text></svg>"
    )
    return "\n".join(lines)


def around_the_median(steps_of_ranks):
    """Return a Window around a step of the first rank that took its median time, or None."""
    common = sorted(set.intersection(*(set(steps) for steps in steps_of_ranks.values())))
    inner = [number for number in common if number > 2 and {number - 1, number + 3} <= {*common}]
    inner = inner or common[1:]
    if not inner:
        return None
    rows, first = steps_of_ranks.values(), next(iter(steps_of_ranks.values()))

    def seconds(number):
        return first[number].end - first.get(number - 1, first[number]).end

    middle = sorted(inner, key=seconds)[len(inner) // 2]
    begins = [steps[middle - 1].end for steps in rows if middle - 1 in steps]
    if not begins:
        return None
    shown = [number for number in range(middle, middle + SHOWN) if number in common]
    end = max(steps[shown[-1]].end for steps in rows)
    return Window(steps_of_ranks, shown, min(begins), end)


def row_of(window, top, rank, steps):
    """Yield the elements of a rank. top: where its row begins."""
    yield (
        f'<text x="8" y="{top + 40}">rank {rank}</text><rect x="80" y="{top + 22}" width="860"'
        ' height="26" fill="#eeeeee"/>'
    )
    for number in [*window.shown, window.shown[-1] + 1]:
        if number not in steps:
            continue
        for span in steps[number].spans:
            begin, end = max(span.begin, window.begin), min(span.end, window.end)
            if end > begin:
                yield (
                    f'<rect x="{window.place(begin):.1f}" y="{top + 22}"'
                    f' width="{max(0.4, window.length(end - begin)):.1f}" height="26"'
                    f' fill="{COLOURS[span.part]}"><title>{NAMES[span.part]}:'
                    f" {1e3 * (end - begin):.2f} ms</title></rect>"
                )
        if number in window.shown:
            place = window.place(steps[number].end)
            yield f'<path d="M{place:.1f} {top + 18}v34" stroke="black"/>'


def axis_of(window):
    """Yield the elements of the time axis, in milliseconds."""
    seconds, low = window.end - window.begin, window.height
    tick = 10 ** len(str(int(1e3 * seconds / 2))) / 1e4
    tick = next(each for each in (tick, 2 * tick, 5 * tick, 10 * tick) if seconds / each < 12)
    for number in range(int(seconds / tick) + 1):
        place = LEFT + window.length(number * tick)
        yield (
            f'<path d="M{place:.1f} {low + 24}v6" stroke="black"/><text x="{place:.1f}"'
            f' y="{low + 44}" text-anchor="middle">{1e3 * number * tick:g}</text>'
        )
    yield f'<text x="8" y="{low + 44}">ms</text>'


def legend_of(low):
    """Yield the elements that name the colours. low: where the rows end."""
    place = LEFT
    for part, name in NAMES.items():
        yield (
            f'<rect x="{place}" y="{low + 64}" width="12" height="12" fill="{COLOURS[part]}"/>'
            f'<text x="{place + 17}" y="{low + 75}">{name}</text>'
        )
        place += 34 + 7 * len(name)
