"""Draws `system.svg`, the picture of a run in the README: `python docs/assets/system.py`."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 920, 330
BOXES = {  # name: left, top, width, second line, colour
    "tasks": (20, 120, 110, "curriculum/", "#e8f0fe"),
    "rollout": (180, 120, 140, "sampler and environment", "#e8f0fe"),
    "reward": (370, 120, 110, "rewards/", "#e8f0fe"),
    "group": (530, 120, 100, "schedule/", "#e8f0fe"),
    "batch": (680, 120, 100, "algorithms/", "#fef3e0"),
    "learner": (820, 120, 90, "learners/", "#fef3e0"),
    "experience pool": (180, 240, 140, "experience/", "#e6f4ea"),
}
HEIGHT_OF_BOX = 56


def box(name: str) -> str:
    left, top, width, below, colour = BOXES[name]
    middle = left + width / 2
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{HEIGHT_OF_BOX}" rx="6" fill="{colour}" stroke="#5f6368"/>'
        f'<text x="{middle}" y="{top + 24}" font-weight="600">{name}</text>'
        f'<text x="{middle}" y="{top + 43}" class="small">{below}</text>'
    )


def arrow(path: str, label: str = "", x: float = 0, y: float = 0) -> str:
    text = f'<text x="{x}" y="{y}" class="small">{label}</text>' if label else ""
    return f'<path d="{path}" fill="none" stroke="#5f6368" stroke-width="1.5" marker-end="url(#head)"/>{text}'


def draw() -> str:
    line = 120 + HEIGHT_OF_BOX / 2
    arrows = [
        arrow(f"M130 {line} H176"),
        arrow(f"M320 {line} H366"),
        arrow(f"M480 {line} H526"),
        arrow(f"M630 {line} H676"),
        arrow(f"M780 {line} H816"),
        arrow("M865 120 V84 H250 V116", "publish new weights", 560, 77),
        arrow("M580 176 V268 H324", "successes of partly solved tasks, token-exact", 455, 286),
        arrow("M180 268 H75 V180", "solve rates", 126, 286),
        arrow("M320 252 H555 V180", "stored trajectories join later groups", 440, 245),
    ]
    schedule = (
        '<rect x="8" y="20" width="906" height="34" rx="6" fill="#f1f3f4" stroke="#9aa0a6" stroke-dasharray="4 3"/>'
        '<text x="461" y="42">schedule: what may start when, bounded staleness, who has the device</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14" text-anchor="middle"><style>.small{font-size:11px;fill:#3c4043}</style>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5f6368"/></marker></defs>'
        f"{schedule}{''.join(map(box, BOXES))}{''.join(arrows)}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("system.svg").write_text(draw(), encoding="utf-8")
