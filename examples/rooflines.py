# %% [markdown]
# # Which wall does attention stand against?
# Cells of a notebook (Jupyter, VS Code) and a script: `python examples/rooflines.py [FOLDER]` writes
# the drawings as SVG. Nothing is measured here: `rafter probe` and `rafter report` do that.

# %%
import pathlib
import sys

import rafter

arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
folder = pathlib.Path(arguments[0] if arguments else ".")

# %% [markdown]
# ## One length, three pipelines
# The arithmetic is the same; what passes through memory is not.

# %%
pipelines = [
    rafter.explain(seqlen=4096, heads_q=32, head_dim=128, dtype="bf16", pipeline=pipeline, device="h200")
    for pipeline in ("unfused", "half-fused", "fused")
]
for explanation in pipelines:
    print(explanation)
rafter.roofline.plot(pipelines).save(folder / "pipelines.svg")

# %% [markdown]
# ## Prefill against decode
# One new query does one FLOP for each byte of the cache and head that shares it, here four: no length
# makes it compute-bound.

# %%
prefill = [
    rafter.explain(seqlen=seqlen, heads_q=32, heads_kv=8, dtype="bf16", causal=True, device="h200")
    for seqlen in (256, 1024, 4096, 16384)
]
decode = [
    rafter.explain(seqlen_q=1, seqlen_kv=seqlen, heads_q=32, heads_kv=8, dtype="bf16", device="h200")
    for seqlen in (1024, 16384)
]
rafter.roofline.plot(prefill + decode).save(folder / "prefill_and_decode.svg")
for explanation in prefill + decode:
    print(f"{explanation.intensity_flop_per_byte:9.1f} FLOP/B: {explanation.verdict}")
assert all(e.intensity_flop_per_byte < prefill[-1].intensity_flop_per_byte for e in decode)

# %% [markdown]
# ## The same attention on other machines

# %%
for name in rafter.devices:
    explanation = rafter.explain(seqlen=2048, heads_q=16, pipeline="fused", device=name)
    print(f"{name:24} {explanation.verdict}")
