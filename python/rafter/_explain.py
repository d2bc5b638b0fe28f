"""What attention costs and which wall it meets, as values; the device database."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

from . import _core

_PREFIXES = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1: "", 1e-3: "m", 1e-6: "µ"}


def quantity(value: Optional[float], unit: str) -> str:
    """A figure in decimal units: 1.23 TFLOP."""
    if value is None:
        return "not known"
    for scale, prefix in _PREFIXES.items():
        if scale <= abs(value) < float("inf"):
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _table(title: str, rows: List[Tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>"
        for a, b in rows
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


class Ceiling(NamedTuple):
    """A rate that a kernel cannot pass while it lacks something."""

    name: str
    flop_per_s: float
    advice: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """What an attention costs under a convention, and which wall it meets on a device.

    SI base units, the unit in the name; time_dispatch_s is None when the device has no launch cost.
    """

    device: str
    convention: str
    pipeline: str
    pass_: str
    dtype: str
    flops: float
    matmul_flops: float
    softmax_flops: float
    bytes: float
    bytes_by_term: Dict[str, float]
    launches: float
    footprint_bytes: float
    score_matrix_bytes: float
    intensity_flop_per_byte: float
    ridge_flop_per_byte: float
    peak_flop_per_s: float
    bandwidth_bytes_per_s: float
    attainable_flop_per_s: float
    time_s: float
    time_compute_s: float
    time_bandwidth_s: float
    time_dispatch_s: Optional[float]
    wall: str
    near_ridge: bool
    verdict: str
    ceilings: Tuple[Ceiling, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ceilings", tuple(Ceiling(*c) for c in self.ceilings))

    def as_dict(self) -> dict:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _title(self) -> str:
        what = f"Attention ({self.pipeline}, {self.pass_} pass, {self.dtype})"
        return f"{what} on {self.device} is {self.verdict}"

    def _rows(self) -> List[Tuple[str, str]]:
        return [
            ("arithmetic", quantity(self.flops, "FLOP")),
            ("memory traffic", quantity(self.bytes, "B")),
            ("intensity", f"{self.intensity_flop_per_byte:.4g} FLOP/B"),
            ("ridge", f"{self.ridge_flop_per_byte:.4g} FLOP/B"),
            ("attainable", quantity(self.attainable_flop_per_s, "FLOP/s")),
            ("time", quantity(self.time_s, "s")),
            ("- arithmetic", quantity(self.time_compute_s, "s")),
            ("- memory", quantity(self.time_bandwidth_s, "s")),
            ("- dispatch", quantity(self.time_dispatch_s, "s")),
            ("footprint", quantity(self.footprint_bytes, "B")),
            ("convention", self.convention),
        ]

    def __repr__(self) -> str:
        return "\n".join([self._title(), *(f"  {a:16} {b}" for a, b in self._rows())])

    def _repr_html_(self) -> str:
        return _table(self._title(), self._rows())


class Figure(NamedTuple):
    """One figure of a device in SI base units; kind is spec, measured, derived or assumed."""

    value: float
    unit: str
    kind: str
    source: str


@dataclass(frozen=True, repr=False)
class Device:
    """What a machine can do: named figures, each with its source."""

    name: str
    title: str
    kind: str
    figures: Dict[str, Figure]
    notes: Dict[str, str]

    def _rows(self) -> List[Tuple[str, str]]:
        return [
            (key, f"{f.value:.5g} {f.unit} ({f.kind}: {f.source})")
            for key, f in self.figures.items()
        ]

    def __repr__(self) -> str:
        lines = (f"  {key:32} {f.value:.5g} {f.unit} ({f.kind})" for key, f in self.figures.items())
        return "\n".join([f"{self.name}: {self.title}", *lines])

    def _repr_html_(self) -> str:
        return _table(f"{self.name}: {self.title}", self._rows())


def _device(data: dict) -> Device:
    figures = {key: Figure(**figure) for key, figure in data["figures"].items()}
    return Device(**{**data, "figures": figures})


class Devices(Mapping):
    """The device database: names to rafter.Device."""

    def __getitem__(self, name: str) -> Device:
        if name not in self:
            raise KeyError(f"{name}: {', '.join(self)} allowed")
        return _device(_core.device(name))

    def __iter__(self) -> Iterator[str]:
        return iter(_core.device_names())

    def __contains__(self, name: object) -> bool:
        return name in _core.device_names()

    def __len__(self) -> int:
        return len(_core.device_names())

    def load(self, path: str) -> Device:
        """Reads a device file, such as `rafter probe` writes."""
        return _device(_core.load_device(path))

    def this_cpu(self) -> Device:
        """An estimate of this machine's CPU; `rafter probe` measures it."""
        return _device(_core.this_cpu())

    def __repr__(self) -> str:
        return f"<rafter.devices: {', '.join(self)}>"


devices = Devices()


def kernels() -> List[dict]:
    """Every kernel of this build: name, device, pass_, pipeline, dtypes, whether this machine has
    it."""
    return _core.kernels()


def explain(
    *,
    seqlen: Optional[int] = None,
    seqlen_q: Optional[int] = None,
    seqlen_kv: Optional[int] = None,
    batch: int = 1,
    heads_q: int = 1,
    heads_kv: int = 0,
    head_dim: int = 128,
    head_dim_v: int = 0,
    dtype: str = "bf16",
    causal: bool = False,
    window: Optional[Tuple[Optional[int], Optional[int]]] = None,
    align: Optional[str] = None,
    pipeline: str = "fused",
    pass_: str = "forward",
    splits: int = 1,
    device: Optional[str] = None,
    convention: str = "exact",
) -> Explanation:
    """What an attention costs and which wall it meets, on any device; no hardware needed.

    Args:
        seqlen: rows and keys alike; or seqlen_q and seqlen_kv.
        heads_kv: 0 is heads_q. head_dim_v: 0 is head_dim.
        dtype: f32, f16, bf16, e4m3, e5m2, int8 or int4.
        causal, window, align: as rafter.attention.
        pipeline: "unfused", "half-fused", "fused" or "split-kv". pass_: "forward" or "backward".
        splits: parts of the keys, for split-kv.
        device: a name of rafter.devices, or a file of `rafter probe` (with a '/' or ending in
            .json); default: this machine's probe when it was made, else h100-sxm.
        convention: "exact", "lecture" or "solution".
    """
    if seqlen is not None and (seqlen_q is not None or seqlen_kv is not None):
        raise ValueError("seqlen: given with seqlen_q or seqlen_kv; one or the other allowed")
    if seqlen is None and (seqlen_q is None or seqlen_kv is None):
        raise ValueError("seqlen: None given; a length allowed, or seqlen_q and seqlen_kv")
    sizes = {
        "batch": batch,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "seqlen_q": seqlen if seqlen_q is None else seqlen_q,
        "seqlen_kv": seqlen if seqlen_kv is None else seqlen_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": dtype,
    }
    return Explanation(
        **_core.explain(
            sizes,
            causal=causal,
            window=window,
            align=align,
            pipeline=pipeline,
            pass_=pass_,
            device=device,
            convention=convention,
            splits=splits,
        )
    )
