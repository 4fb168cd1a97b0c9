"""Draw the pages' pictures: `python docs/pictures/draw.py` writes the SVG files into its own folder."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, PALE, WHITE = "#263238", "#eceff1", "#ffffff"
BLUE, GREEN, ORANGE, RED, VIOLET = "#bbdefb", "#c8e6c9", "#ffe0b2", "#ffcdd2", "#e1bee7"
COLOURS = (BLUE, GREEN, ORANGE, VIOLET)


class Picture:
    """Lines of SVG; lengths are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{WHITE}"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, *text: str, fill: str = PALE, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{INK}"{dash}/>'
        )
        for number, line in enumerate(text):
            self.text(x + w / 2, y + h / 2 + 5 + 17 * (number - (len(text) - 1) / 2), line, bold=number == 0)

    def text(self, x: float, y: float, text: str, *, at: str = "middle", bold: bool = False, size: int = 14) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._lines.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" font-size="{size}" fill="{INK}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(self, *points: tuple[float, float], tips: str = "end", dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        start = ' marker-start="url(#tip)"' if tips == "both" else ""
        end = ' marker-end="url(#tip)"' if tips in ("end", "both") else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._lines.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"{start}{end}{dash}/>'
        )

    def cross(self, x: float, y: float) -> None:
        self._lines.append(
            f'<path d="M{x - 8:g} {y - 8:g}l16 16m0 -16l-16 16" stroke="#c62828" stroke-width="4" '
            'stroke-linecap="round"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])


def processes() -> Picture:
    p = Picture(720, 430, "The processes of a job on one host")
    p.box(10, 10, 700, 410, fill=WHITE, dashed=True)
    p.text(24, 34, "one host", at="start", bold=True)
    p.box(30, 60, 210, 74, "kungfu-run", "launcher: processes,", "failures, new workers", fill=BLUE)
    p.box(290, 60, 170, 74, "broker", "passes memory to", "known processes", fill=BLUE)
    p.box(510, 60, 180, 74, "config server", "keeps the desired", "cluster", fill=ORANGE)
    p.line((240, 97), (290, 97), tips="both")
    p.line((600, 60), (600, 44), (135, 44), (135, 60), tips="both")
    p.text(480, 38, "reads, and writes after a failure", size=12)
    p.box(30, 180, 210, 56, "supervisor", "parent of all workers", fill=BLUE)
    p.line((135, 134), (135, 180))
    for number in range(3):
        x = 290 + 140 * number
        p.box(x, 180, 120, 74, f"worker {number}", "python train.py", "MindSpore", fill=GREEN)
    p.line((240, 208), (290, 208))
    p.text(265, 200, "starts", size=12)
    p.line((375, 134), (375, 156), (630, 156), (630, 180), dashed=True)
    p.line((350, 134), (350, 180), dashed=True)
    p.line((490, 156), (490, 180), dashed=True)
    p.text(560, 150, "descriptor of the segment", size=12)
    p.box(
        290,
        320,
        400,
        70,
        "segment of cluster version 7",
        "all reductions go through it; it announces",
        "operations, data and failures",
        fill=VIOLET,
    )
    for number in range(3):
        p.line((350 + 140 * number, 254), (350 + 140 * number, 320), tips="both")
    p.line((30, 97), (20, 97), (20, 355), (290, 355), dashed=True)
    p.text(40, 348, "the launcher marks failures", at="start", size=12)
    return p


def hosts() -> Picture:
    p = Picture(820, 400, "A job on two hosts, and their transports")
    for left, title, launcher in (
        (10, "first host: the head node", ("kungfu-run", "decides for all; the job's", "only broker is here")),
        (460, "second host", ("kungfu-run", "follows the head node,", "reports to it")),
    ):
        first = 0 if left == 10 else 2
        p.box(left, 10, 350, 380, fill=WHITE, dashed=True)
        p.text(left + 14, 34, title, at="start", bold=True)
        link = left + (224 if left == 10 else 16)
        workers = left + (16 if left == 10 else 148)
        p.box(left + 65, 50, 220, 74, *launcher, fill=BLUE)
        p.box(link, 174, 110, 74, "transport", "threads of", "kungfu-run", fill=BLUE)
        for number in range(2):
            p.box(workers + 98 * number, 174, 88, 74, f"worker {first + number}", "train.py", fill=GREEN)
            p.line((workers + 98 * number + 44, 248), (workers + 98 * number + 44, 310), tips="both")
        p.line((link + 55, 248), (link + 55, 310), tips="both")
        p.box(left + 16, 310, 318, 62, "segment of this host", "its workers and its transport are members", fill=VIOLET)
    p.line((295, 87), (525, 87), tips="both")
    p.text(410, 79, "orders, reports", size=12)
    p.line((344, 211), (476, 211), tips="both")
    p.text(410, 203, "sums, TCP", size=12)
    return p


def growing() -> Picture:
    p = Picture(720, 330, "A cluster that grows while it trains")
    left, step = 110, 70
    for row, name in enumerate(("worker 0", "worker 1", "new worker")):
        p.text(left - 12, 76 + 60 * row, name, at="end", bold=True)
    for number in range(8):
        x = left + step * number
        p.text(x + step / 2, 40, f"step {number + 20}", size=12)
        for row in range(2):
            p.box(x + 2, 52 + 60 * row, step - 4, 36, fill=GREEN)
    p.box(left + step + 20, 172, 3 * step + 40, 36, "starts, imports, compiles", fill=ORANGE)
    p.box(left + 5 * step - 6, 172, step - 46, 36, fill=VIOLET)
    for number in range(5, 8):
        if number > 5:
            p.box(left + step * number + 2, 172, step - 4, 36, fill=GREEN)
    p.box(left + 5 * step + 22, 172, step - 24, 36, fill=GREEN)
    p.line((left + step + 20, 250), (left + step + 20, 214))
    p.text(left + step + 20, 268, "3 workers are requested", size=13)
    p.text(left + step + 20, 285, "schedule, policy, kungfu-run resize", size=12)
    p.line((left + 5 * step + 4, 284), (left + 5 * step + 4, 214))
    p.text(left + 5 * step + 4, 302, "it is ready: all go over between two steps", size=13)
    p.text(left + 5 * step + 4, 319, "and it receives weights, moments, step, place in the data", size=12)
    return p


def death() -> Picture:
    p = Picture(720, 372, "A worker fails in a step")
    for top, title, part in (
        (10, "1. It fails before its part is complete: the others reduce again, without it", False),
        (196, "2. It fails after its part is complete: the others end with it", True),
    ):
        p.text(20, top + 18, title, at="start", bold=True)
        for row in range(3):
            y = top + 32 + 44 * row
            p.text(96, y + 22, f"worker {row}", at="end")
            p.box(108, y, 150, 34, "gradients", fill=GREEN)
            dead = row == 2
            if dead and not part:
                p.box(266, y, 60, 34, fill=RED)
                p.cross(326, y + 17)
                continue
            p.box(266, y, 110, 34, "reduction", fill=BLUE)
            if dead:
                p.cross(376 + 20, y + 17)
                continue
            x = 384
            if not part:
                p.box(x, y, 128, 34, "again, of two", fill=BLUE)
                x += 136
            p.box(x, y, 80, 34, "update", fill=GREEN)
            p.box(x + 88, y, 88, 34, "next step", fill=PALE)
    p.text(344, 152, "its samples go back and are trained later in the epoch", at="start", size=12)
    p.text(414, 338, "its samples are trained", at="start", size=12)
    return p


def dealing() -> Picture:
    p = Picture(720, 280, "How samples are partitioned")
    p.text(20, 28, "an epoch: a permutation of all samples, by seed and epoch alone", at="start", bold=True)
    x = 20
    sizes = [(2, 4), (2, 4), (3, 4), (3, 4), (1, 4)]
    starts = []
    for workers, _ in sizes:
        starts.append(x)
        share = 120 / workers
        for rank in range(workers):
            p.box(x + share * rank, 44, share, 40, fill=COLOURS[rank])
        x += 136
    for number, at in enumerate(starts):
        p.text(at + 60, 106, f"step {number}", size=13)
        workers = sizes[number][0]
        p.text(at + 60, 124, f"{workers} worker{'' if workers == 1 else 's'}", size=12)
    p.line((20, 144), (692, 144))
    p.text(356, 164, "training walks along it; a global batch is the same samples at any size", size=13)
    for rank in range(3):
        p.box(150 + 150 * rank, 186, 22, 22, fill=COLOURS[rank])
        p.text(180 + 150 * rank, 202, f"rank {rank}'s share", at="start", size=13)
    p.text(
        20,
        240,
        "After a change the rest of the epoch is partitioned again, behind the trained steps.",
        at="start",
        size=13,
    )
    p.text(
        20,
        260,
        "What was prefetched is not trained; a failed worker's samples go to the end of the pool.",
        at="start",
        size=13,
    )
    return p


def shards() -> Picture:
    p = Picture(720, 330, "Shards, and the tree by which their gradients are added")
    p.text(20, 28, "a step of 8 shards, assigned to 3 workers", at="start", bold=True)
    dealt = (0, 0, 0, 1, 1, 1, 2, 2)
    centres = [60 + 86 * i for i in range(8)]
    for number, rank in enumerate(dealt):
        p.box(centres[number] - 38, 44, 76, 40, f"shard {number}", fill=COLOURS[rank])
    y = 84
    while len(centres) > 1:
        above, centres = centres, [(a + b) / 2 for a, b in zip(centres[::2], centres[1::2])]
        for number, x in enumerate(centres):
            p.line((above[2 * number], y), (x - 8, y + 32))
            p.line((above[2 * number + 1], y), (x + 8, y + 32))
            p.box(x - 16, y + 32, 32, 28, "+", fill=WHITE)
        y += 60
    p.text(centres[0] + 30, y - 8, "one sum, the same bits for any assignment", at="start", size=13)
    for rank in range(3):
        p.box(40 + 130 * rank, 290, 22, 22, fill=COLOURS[rank])
        p.text(70 + 130 * rank, 306, f"worker {rank}", at="start", size=13)
    return p


def architecture() -> Picture:
    p = Picture(900, 500, "The processes of a job on two hosts")
    p.box(330, 10, 240, 60, "cluster store", "desired cluster, leadership lease", fill=ORANGE)
    p.box(690, 18, 190, 44, "kungfu-run resize", fill=PALE)
    p.line((690, 40), (570, 40))
    for left, title in ((10, "first host (head node)"), (460, "second host")):
        p.box(left, 90, 430, 400, fill=WHITE, dashed=True)
        p.text(left + 14, 478, title, at="start", bold=True)
        p.box(left + 14, 126, 402, 106, fill=WHITE)
        first = left == 10

        def across(x: float, width: float = 0, left: float = left, first: bool = first) -> float:
            """The second host is the first one's mirror image, so that the transports are neighbours."""
            return left + (x if first else 430 - x - width)

        if first:
            p.box(across(26), 150, 112, 70, "controller", "decides for", "all hosts", fill=BLUE)
        p.box(across(156, 118), 150, 118, 70, "agent", "processes,", "memory", fill=BLUE)
        p.box(across(292, 112), 150, 112, 70, "inter-host", "transport", fill=BLUE)
        p.text(across(166 if first else 26, 112), 144, "kungfu-run", at="start", bold=True, size=12)
        p.box(across(26, 112), 270, 112, 56, "supervisor", "starts workers", fill=BLUE)
        p.line((across(176), 220), (across(176), 250), (across(82), 250), (across(82), 270), tips="both")
        for number in range(2):
            x = across(156 + 104 * number, 94)
            p.box(x, 270, 94, 56, f"worker {number if first else 3 - number}", "train.py", fill=GREEN)
            p.line((x + 47, 326), (x + 47, 384), tips="both")
        p.line((across(138), 298), (across(156), 298))
        p.line((across(203), 220), (across(203), 270), tips="both", dashed=True)
        p.line((across(203), 246), (across(307), 246), (across(307), 270), dashed=True)
        p.line((across(384), 220), (across(384), 384), tips="both")
        p.box(left + 14, 384, 402, 66, "segment of the cluster version", "its workers and the transport are members")
        p.text(across(260), 262, "requests", size=12)
    p.line((148, 185), (166, 185), tips="both")
    p.line((60, 150), (60, 40), (330, 40), tips="both")
    p.line((110, 150), (110, 112), (675, 112), (675, 150), tips="both")
    p.text(450, 106, "orders, reports", size=12)
    p.line((414, 185), (486, 185), tips="both")
    p.text(450, 178, "sums", size=12)
    return p


PICTURES = {
    "architecture": architecture,
    "processes": processes,
    "hosts": hosts,
    "growing": growing,
    "death": death,
    "dealing": dealing,
    "shards": shards,
}


def drawn() -> dict[str, str]:
    """Return a dict from file names to the files' texts."""
    return {f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    for name, text in drawn().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
