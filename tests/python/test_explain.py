"""rafter.explain, devices, kernels and pictures agree with the tool and with each other."""

import ast
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest
import rafter

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_an_explanation_counts_by_hand():
    e = rafter.explain(
        seqlen=64, heads_q=4, heads_kv=2, head_dim=32, dtype="f16", device="h100-sxm"
    )
    assert e.matmul_flops == 2 * 2 * 4 * 64 * 64 * 32
    assert e.softmax_flops == 5 * 4 * 64 * 64
    assert e.flops == e.matmul_flops + e.softmax_flops
    assert e.bytes_by_term["k"] == 2 * 64 * 32 * 2
    assert e.bytes == sum(e.bytes_by_term.values())
    assert e.intensity_flop_per_byte == pytest.approx(e.flops / e.bytes)
    assert e.wall == "dispatch" and e.device == "h100-sxm" and e.dtype == "f16"
    assert all(c.name and c.flop_per_s > 0 for c in e.ceilings)


def test_explanations_show_themselves():
    e = rafter.explain(seqlen=4096, pipeline="unfused", device="h100-sxm", dtype="bf16")
    assert "bandwidth-bound" in repr(e) and "FLOP/B" in repr(e)
    assert xml.etree.ElementTree.fromstring(e._repr_html_()).tag == "table"
    assert e.as_dict()["pipeline"] == "unfused"
    with pytest.raises(AttributeError):
        e.flops = 0


def test_arguments_change_the_explanation_or_are_refused():
    base = dict(seqlen=512, device="h200")
    others = [
        {"causal": True}, {"window": (8, 8)}, {"pipeline": "unfused"}, {"pass_": "backward"},
        {"heads_q": 8}, {"dtype": "f16", "pipeline": "half-fused"}, {"convention": "lecture"},
        {"batch": 3}, {"head_dim": 64}, {"head_dim_v": 32}, {"device": "a100-80gb-sxm"},
        {"pipeline": "split-kv", "splits": 4},
    ]  # fmt: skip
    seen = {repr(rafter.explain(**base))}
    for more in others:
        seen.add(repr(rafter.explain(**{**base, **more})))
    assert len(seen) == len(others) + 1
    for more, message in [
        ({"device": "abacus"}, "abacus given"),
        ({"dtype": "f33"}, "f33 given"),
        ({"pipeline": "abacus"}, "pipeline: abacus"),
        ({"convention": "abacus"}, "abacus given"),
        ({"seqlen_q": 3}, "^seqlen: given with"),
        ({"seqlen": None}, "^seqlen: None given"),
        ({"batch": 1.5}, "batch: 1.5 given"),
        ({"heads_q": 3, "heads_kv": 2}, "heads_kv: 2 given"),
        ({"splits": 4, "pipeline": "fused"}, "splits: 4 given; 1, or pipeline"),
    ]:
        with pytest.raises(ValueError, match=message):
            rafter.explain(**{**base, **more})
    with pytest.raises(OSError, match="nowhere"):
        rafter.explain(seqlen=1, device="/nowhere/device.json")


def test_devices_are_a_mapping_with_sources():
    assert "h100-sxm" in rafter.devices and len(rafter.devices) == len(list(rafter.devices))
    h100 = rafter.devices["h100-sxm"]
    figure = h100.figures["bandwidth_bytes_per_s"]
    assert figure.unit == "B/s" and figure.value > 1e12 and figure.source
    assert "h100-sxm" in repr(h100)
    assert xml.etree.ElementTree.fromstring(h100._repr_html_()).tag == "table"
    assert rafter.devices.this_cpu().kind == "cpu"
    with pytest.raises(KeyError, match="h100-sxm"):
        rafter.devices["abacus"]


def test_a_picture_has_a_point_per_explanation():
    points = [
        rafter.explain(seqlen=n, pipeline=p, device="h100-sxm")
        for n in (512, 16384) for p in ("fused", "unfused")
    ]  # fmt: skip
    picture = rafter.roofline.plot(points, device="h200", labels=["a", "b<", "c", "d"])
    root = xml.etree.ElementTree.fromstring(picture.svg)
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    roofs = [e for e in root.iter() if e.get("class") == "roof"]
    assert len(circles) == 4 and len(roofs) == 2
    assert float(circles[2].get("cx")) > float(circles[3].get("cx"))  # fused has more intensity
    assert float(circles[2].get("cy")) < float(circles[3].get("cy"))  # and is faster
    for arguments, message in [
        (dict(points=points, labels=["a"]), "^labels: 1 given"),
        (dict(), "^device: None given"),
        (dict(points="x"), r"^points\[0\]: 'x' given"),
        (dict(device="mi300x", dtype="int4"), "peak_int4"),
        (dict(points=rafter.explain(seqlen=0, device="h200")), r"points\[0\]: no work"),
    ]:
        with pytest.raises(ValueError, match=message):
            rafter.roofline.plot(**arguments)


def test_the_stubs_name_all_that_the_compiled_half_has():
    def public(names):
        return {n for n in names if not n.startswith("_") or n == "__version__"}

    core = rafter._core
    tree = ast.parse((pathlib.Path(rafter.__file__).parent / "_core.pyi").read_text())
    named = {None: set()}
    for node in tree.body:
        name = getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None)
        named[None].add(name)
        if isinstance(node, ast.ClassDef):
            named[name] = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
    assert public(vars(core)) <= named[None]
    for name in ("Candidate", "Plan"):
        assert public(vars(getattr(core, name))) <= named[name]


def test_the_version_is_that_of_the_build():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert rafter.__version__ == re.search(r"project\(rafter VERSION ([0-9.]+)", cmake)[1]


def test_importing_needs_no_other_package():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import rafter; rafter.explain(seqlen=64); "
        "print(sorted({'numpy', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    path = str(pathlib.Path(rafter.__file__).parents[1])
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_what_attention_does_not_need_is_imported_when_asked_for():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import rafter; "
        "before = {m for m in sys.modules if m.startswith('rafter.')}; "
        "missing = [n for n in rafter.__all__ if not hasattr(rafter, n)]; "
        "print(sorted(before), 'dataclasses' in sys.modules, missing, set(rafter.__all__) <= "
        "set(dir(rafter)))"
    )
    path = str(pathlib.Path(rafter.__file__).parents[1])
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    expected = "['rafter._arrays', 'rafter._attention', 'rafter._core'] True [] True"
    assert result.stdout.strip() == expected, result.stderr
    with pytest.raises(AttributeError, match="no attribute 'abacus'"):
        rafter.abacus


def test_the_package_shows_its_own_names_and_says_how_torch_is_had():
    shown = {name for name in dir(rafter) if not name.startswith("__")} - {"torch"}
    assert shown == set(rafter.__all__) - {"__version__"}
    code = "import sys; sys.path.insert(0, sys.argv[1]); import rafter; rafter.torch"
    path = str(pathlib.Path(rafter.__file__).parents[1])
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert run.returncode == 1
    assert "AttributeError: rafter.torch is there after `import rafter.torch`" in run.stderr
