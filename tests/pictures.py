"""What an SVG of matplotlib shows, so that two of them can be compared.

Another version of matplotlib, or other fonts, may leave other margins. So the texts must be equal,
and the points of each panel the same after its x and its y have been shifted and scaled as a whole.
The ticks are among the points: data that moves against its scale is noticed.

Pictures that move are not matplotlib's. Of these, every byte must be the same.
"""

import re
from statistics import mean
from xml.etree import ElementTree

TOLERANCE = 0.05  # in points, of which a panel is some 200 high; from 3.8 to 3.11 it takes 0.01


def contents(path):
    """{panel: (texts, points)} of an SVG; "" is what stands outside of the panels."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    panels = {"": ([], [])}
    collect(ElementTree.parse(path, parser).getroot(), panels, "", True)
    return panels


def collect(element, panels, panel, points_count):
    """Note the texts and points below an element."""
    name = element.get("id", "")
    if re.fullmatch(r"axes_\d+", name):
        panel = name
        panels[panel] = [], []
    if name.startswith(("text_", "legend_")):  # where they stand is a question of fonts
        points_count = False
    texts, points = panels[panel]
    for child in element:
        tag = child.tag.rpartition("}")[2] if isinstance(child.tag, str) else None
        if tag is None:  # a comment: the text that the shapes below it draw
            texts.append(child.text.strip())
        elif tag == "path" and points_count:
            numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", child.get("d"))]
            points += zip(numbers[::2], numbers[1::2], strict=True)
        elif tag == "use" and points_count:
            points.append((float(child.get("x")), float(child.get("y"))))
        elif tag not in ("defs", "metadata"):
            collect(child, panels, panel, points_count)


def differences(path, other):
    """What two pictures do not have in common: a list of lines, empty if they show the same."""
    if "@keyframes" in path.read_text():
        return [] if path.read_bytes() == other.read_bytes() else ["other bytes"]
    ones, others = contents(path), contents(other)
    if set(ones) != set(others):
        return [f"panels {sorted(ones)} and {sorted(others)}"]
    found = []
    for panel, (texts, points) in ones.items():
        other_texts, other_points = others[panel]
        if texts != other_texts:
            found.append(f"{panel}: texts {sorted(set(texts) ^ set(other_texts))}, or their order")
        elif len(points) != len(other_points):
            found.append(f"{panel}: {len(points)} points, not {len(other_points)}")
        elif points:
            off = max(residual([p[axis] for p in points], [p[axis] for p in other_points])
                      for axis in (0, 1))  # fmt: skip
            if off > TOLERANCE:
                found.append(f"{panel}: a point is off by {off:.2f}")
    return found


def residual(values, others):
    """The largest distance that is left after the best shift and scaling of others."""
    middle, other_middle = mean(values), mean(others)
    square = sum((o - other_middle) ** 2 for o in others)
    product = sum((v - middle) * (o - other_middle) for v, o in zip(values, others, strict=True))
    scale = product / square if square else 1
    return max(abs(v - middle - scale * (o - other_middle))
               for v, o in zip(values, others, strict=True))  # fmt: skip
