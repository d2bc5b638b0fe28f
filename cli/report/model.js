// The exact forward cost of attention and its place under a roofline, as the library counts them
// (src/model, convention `exact`). The report carries figures of the library for a grid of problems;
// the page and a test compare them with these.
'use strict';
const RafterModel = (() => {
  const BYTES = {f32: 4, f16: 2, bf16: 2, e4m3: 1, e5m2: 1, int8: 1, int4: 0.5};
  const PIPELINES = ['unfused', 'half-fused', 'fused'];
  const SCORE_PASSES = {'unfused': 4, 'half-fused': 2, 'fused': 0};
  const LAUNCHES = {'unfused': 3, 'half-fused': 2, 'fused': 1};
  const SOFTMAX_FLOPS = 5;     // scale, max, subtract, exp, sum
  const STATISTICS_BYTES = 4;  // lse is f32

  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

  // Visible (query, key) pairs and keys that some row sees; causal masks align bottom-right: row i
  // sees clamp(i + 1 + seqlen_kv − seqlen_q, 0, seqlen_kv) keys.
  function visible(seqlenQ, seqlenKv, causal) {
    if (seqlenQ === 0) return {pairs: 0, keys: 0};
    if (!causal) return {pairs: seqlenQ * seqlenKv, keys: seqlenKv};
    const first = clamp(1 + seqlenKv - seqlenQ, 0, seqlenKv);  // keys of the first row that sees any
    const rows = Math.min(seqlenQ, seqlenKv);                  // rows that see a key
    const least = Math.max(first, 1);
    return {pairs: rows * (least + seqlenKv) / 2, keys: seqlenKv};
  }

  function attentionCost(p) {
    const b = BYTES[p.dtype];
    const headsKv = p.headsKv || p.headsQ;
    const headDimV = p.headDimV || p.headDim;
    const {pairs, keys} = visible(p.seqlenQ, p.seqlenKv, p.causal);
    const allPairs = p.batch * p.headsQ * pairs;
    const rows = p.batch * p.headsQ * p.seqlenQ;
    const keyReads = p.batch * headsKv * keys;
    const matmul = 2 * allPairs * (p.headDim + headDimV);
    const softmax = SOFTMAX_FLOPS * allPairs;
    const bytes = {
      q: rows * p.headDim * b,
      k: keyReads * p.headDim * b,
      v: keyReads * headDimV * b,
      o: rows * headDimV * b,
      lse: rows * STATISTICS_BYTES,
      scores: SCORE_PASSES[p.pipeline] * allPairs * b,
    };
    const total = Object.values(bytes).reduce((a, x) => a + x, 0);
    return {
      flops: matmul + softmax, matmulFlops: matmul, softmaxFlops: softmax, bytes: total,
      bytesByTerm: bytes, launches: LAUNCHES[p.pipeline], intensity: total > 0 ? (matmul + softmax) / total : 0,
    };
  }

  // figures: key → value of a device. An unknown peak or bandwidth is an error, never 0.
  function predict(cost, figures, dtype) {
    const peak = figures[`peak_${dtype}_flop_per_s`];
    const bandwidth = figures.bandwidth_bytes_per_s;
    if (!(peak > 0)) return {error: `no ${dtype} peak is stated for this device`};
    if (!(bandwidth > 0)) return {error: 'no bandwidth is stated for this device'};
    const ridge = peak / bandwidth;
    const compute = cost.flops / peak;
    const traffic = cost.bytes / bandwidth;
    const dispatch = figures.launch_s > 0 ? cost.launches * figures.launch_s : 0;
    const wall = dispatch > Math.max(compute, traffic) ? 'dispatch'
        : cost.intensity >= ridge ? 'compute' : 'bandwidth';
    return {
      seconds: Math.max(compute, traffic, dispatch), compute, traffic, dispatch, ridge, wall,
      peak, bandwidth, attainable: Math.min(peak, cost.intensity * bandwidth),
    };
  }

  // Differences from the library's own figures, as text; none when all agree to 1e-9.
  function check(grid) {
    const wrong = [];
    for (const row of grid) {
      const cost = attentionCost(row.problem);
      const prediction = predict(cost, row.figures, row.problem.dtype);
      const pairs = [['flops', cost.flops, row.flops], ['bytes', cost.bytes, row.bytes],
        ['seconds', prediction.seconds, row.seconds], ['ridge', prediction.ridge, row.ridge]];
      for (const [name, ours, theirs] of pairs) {
        if (!(Math.abs(ours - theirs) <= 1e-9 * Math.abs(theirs))) {
          wrong.push(`${name} of ${JSON.stringify(row.problem)}: ${ours}, the library says ${theirs}`);
        }
      }
      if (prediction.wall !== row.wall) {
        wrong.push(`wall of ${JSON.stringify(row.problem)}: ${prediction.wall}, the library says ${row.wall}`);
      }
    }
    return wrong;
  }

  return {BYTES, PIPELINES, attentionCost, predict, check};
})();
if (typeof module !== 'undefined') module.exports = RafterModel;
