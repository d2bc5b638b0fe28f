"""Rooflines as pictures, drawn without any other package."""

from __future__ import annotations

import html
import math
from typing import Iterable, List, Optional, Tuple, Union

from ._explain import Device, Explanation, devices, quantity

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 20, 24, 52
_COLORS = ("#1f5fa8", "#c2452d", "#2f7d4f", "#7a4fa3", "#a8741f", "#4a5a68")
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd;fill:none}"
    ".roof{stroke:#333;stroke-width:2;fill:none}"
)


class Picture:
    """A drawing: shows itself in a notebook; `svg` is its text; `save` writes it to a file."""

    def __init__(self, svg: str):
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str) -> None:
        """Writes an SVG file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def __repr__(self) -> str:
        return f"<rafter.roofline.Picture, {len(self.svg)} characters of SVG>"


class _Axes:
    """Logarithmic axes; x and y are ranges of exponents of ten."""

    def __init__(self, x: Tuple[float, float], y: Tuple[float, float]):
        self.x, self.y = x, y

    def at(self, x: float, y: float) -> Tuple[float, float]:
        across = (math.log10(x) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(y) - self.y[0]) / (self.y[1] - self.y[0])
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    def grid(self) -> List[str]:
        parts = []
        for decade in range(math.ceil(self.x[0]), math.floor(self.x[1]) + 1):
            x, bottom = self.at(10.0**decade, 10.0 ** self.y[0])
            parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom:.1f}" class="grid"/>')
            parts.append(_text(x, bottom + 16, f"{10.0**decade:g}", "middle"))
        for decade in range(math.ceil(self.y[0]), math.floor(self.y[1]) + 1):
            left, y = self.at(10.0 ** self.x[0], 10.0**decade)
            parts.append(f'<path d="M{left:.1f} {y:.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
            parts.append(_text(left - 6, y + 4, quantity(10.0**decade, "FLOP/s"), "end"))
        parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 12, "intensity, FLOP/B", "middle"))
        return parts

    def roof(self, name: str, peak: float, bandwidth: float) -> List[str]:
        first, last = (10.0**exponent for exponent in self.x)
        corners = ((first, bandwidth * first), (peak / bandwidth, peak), (last, peak))
        line = " L".join("{:.1f} {:.1f}".format(*self.at(*corner)) for corner in corners)
        x, y = self.at(last, peak)
        label = f"{name}: {quantity(peak, 'FLOP/s')}, {quantity(bandwidth, 'B/s')}"
        return [f'<path d="M{line}" class="roof"/>', _text(x, y - 6, label, "end")]

    def point(self, point: Explanation, name: str, color: str) -> List[str]:
        x, y = self.at(point.intensity_flop_per_byte, point.flops / point.time_s)
        title = html.escape(f"{name}: {point.verdict}, {quantity(point.time_s, 's')}")
        return [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"><title>{title}</title></circle>',
            _text(x + 8, y + 14, name),
        ]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _roof_of(device: Union[str, Device], dtype: str) -> Tuple[str, float, float]:
    spec = devices[device] if isinstance(device, str) else device
    keys = (f"peak_{dtype}_flop_per_s", "bandwidth_bytes_per_s")
    for key in keys:
        if key not in spec.figures:
            raise ValueError(f"device: {spec.name} given, which has no {key}; one with it allowed")
    peak, bandwidth = (spec.figures[key].value for key in keys)
    return spec.name, peak, bandwidth


def plot(
    points: Union[Explanation, Iterable[Explanation]] = (),
    *,
    device: Union[str, Device, None] = None,
    dtype: str = "bf16",
    labels: Optional[Iterable[str]] = None,
) -> Picture:
    """Draws explanations under the roofs of their devices, both axes logarithmic.

    Args:
        points: what rafter.explain gave; each stands at its intensity and at flops / time_s. One
            without work (no FLOPs) cannot stand on logarithmic axes and is refused.
        device: a further roof, by name or as a Device; needed when there are no points.
        dtype: whose matmul peak that roof has.
        labels: one per point; default: its pipeline.
    """
    points = [points] if isinstance(points, Explanation) else list(points)
    for i, point in enumerate(points):
        if not isinstance(point, Explanation):
            raise ValueError(f"points[{i}]: {point!r} given; what rafter.explain gave allowed")
    names = [p.pipeline for p in points] if labels is None else [str(label) for label in labels]
    if len(names) != len(points):
        raise ValueError(f"labels: {len(names)} given; {len(points)} allowed, one per point")
    for i, point in enumerate(points):
        if not (point.flops > 0 and point.time_s > 0 and point.bytes > 0):
            raise ValueError(f"points[{i}]: no work given; flops, bytes and time above 0 allowed")
    roofs = {(p.device, p.peak_flop_per_s, p.bandwidth_bytes_per_s) for p in points}
    if device is not None:
        roofs.add(_roof_of(device, dtype))
    if not roofs:
        raise ValueError("device: None given without points; a name of rafter.devices allowed")

    xs = [peak / bandwidth for _, peak, bandwidth in roofs]
    xs += [p.intensity_flop_per_byte for p in points]
    x = (math.floor(math.log10(min(xs))) - 1, math.ceil(math.log10(max(xs))) + 1)
    ys = [p.flops / p.time_s for p in points] + [b * 10.0 ** x[0] for _, _, b in roofs]
    y = (math.floor(math.log10(min(ys))), math.log10(max(peak for _, peak, _ in roofs)) + 0.4)
    axes = _Axes(x, y)
    parts = axes.grid()
    for roof in sorted(roofs):
        parts += axes.roof(*roof)
    for i, (point, name) in enumerate(zip(points, names)):
        parts += axes.point(point, name, _COLORS[i % len(_COLORS)])
    body = "\n".join(parts)
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}"><style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )
