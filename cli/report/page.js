// Fills the page from the JSON it carries. Text goes in as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const $ = (id) => document.getElementById(id);
  const PIPELINES = RafterModel.PIPELINES;

  // ---- head
  $('title').textContent = `Which wall does attention meet on ${data.machine.title}?`;
  $('subtitle').textContent = data.subtitle;
  document.title = `Rafter report: ${data.machine.title}`;
  const wrong = RafterModel.check(data.model_check);
  const alerts = data.alerts.concat(wrong.length
    ? [`The cost model in this page differs from the library's: ${wrong[0]}`] : []);
  $('alerts').append(...alerts.map((text) => el('p', {class: 'alert'}, text)));

  // ---- verdicts
  $('verdicts').append(...data.verdicts.map((v) => el('div', {class: 'verdict'},
    el('div', {}, el('div', {class: 'who'}, mark(v.pipeline), v.pipeline), el('div', {class: 'wall'}, v.headline)),
    el('p', {}, v.sentence))));

  // ---- ceilings
  showCeilings($('ceilings'), data);
  $('ceilings-note').textContent = data.ceilings_note;

  // ---- measured points
  const points = data.points.filter((p) => !p.refusal);
  table($('points'), [
    {head: 'dtype', once: true, cell: (p) => p.dtype},
    {head: 'length', numeric: true, once: true, cell: (p) => count(p.seqlen)},
    {head: 'pipeline', th: true, cell: (p) => { const s = el('span', {}, mark(p.pipeline), p.pipeline); return s; }},
    {head: 'predicted', numeric: true, cell: (p) => si(p.predicted_s, 's')},
    {head: 'measured', numeric: true, cell: (p) => si(p.median_s, 's')},
    {head: '10th to 90th percentile', numeric: true, cell: (p) => `${si(p.p10_s, 's')} – ${si(p.p90_s, 's')}`,
      odd: (p) => (p.p90_s - p.p10_s) / p.median_s > 0.25},
    {head: 'rate', numeric: true, cell: (p) => si(p.flop_per_s, 'FLOP/s')},
    {head: 'of bound', numeric: true, cell: (p) => percent(p.share_of_bound), odd: (p) => p.share_of_bound > 1.02},
    {head: 'wall, model', cell: (p) => p.wall_predicted},
    {head: 'wall, measured', cell: (p) => p.wall_measured},
    {head: 'bytes (modelled)', numeric: true, cell: (p) => si(p.bytes, 'B')},
    ...(points.some((p) => p.counted_bytes != null)
      ? [{head: 'bytes (counted)', numeric: true,
        cell: (p) => (p.counted_bytes != null ? si(p.counted_bytes, 'B') : '–')}] : []),
    {head: 'from', cell: (p) => p.level.replace('l', 'L')},
    {head: 'data', once: true, cell: (p) => (p.data === 'random' ? p.data : 'file')},
  ], points, (p) => `${p.dtype}/${p.seqlen}`);
  $('points-note').textContent = data.points_note;

  // ---- roofline
  const dtypes = [...new Set(points.map((p) => p.dtype))];
  let chart = null, shown = dtypes[0];
  function rooflinePoints(dtype) {
    const of = points.filter((p) => p.dtype === dtype);
    return of.flatMap((p) => {
      const ends = of.filter((q) => q.pipeline === p.pipeline).map((q) => q.seqlen);
      const isEnd = p.seqlen === Math.min(...ends) || p.seqlen === Math.max(...ends);
      const base = {pipeline: p.pipeline, x: p.intensity_flop_per_byte, source: p};
      return [
        {...base, y: p.flops / p.predicted_s, cap: p.time_dispatch_s > 0 ? p.flops / p.time_dispatch_s : 0,
          measured: false},
        {...base, y: p.flop_per_s, low: p.flops / p.p90_s, high: p.flops / p.p10_s, measured: true,
          label: p.pipeline !== 'fused'
            ? (p.seqlen === (p.pipeline === 'unfused' ? Math.min(...ends) : Math.max(...ends)) ? p.pipeline : '')
            : !isEnd ? '' : p.seqlen === Math.max(...ends) ? `fused, ${count(p.seqlen)}` : count(p.seqlen),
          side: {'unfused': 'left', 'half-fused': 'right'}[p.pipeline]},
      ];
    });
  }
  function describe(point) {
    const p = point.source;
    return point.measured
      ? `${p.pipeline}, length ${count(p.seqlen)}: measured ${si(p.median_s, 's')}, ${si(p.flop_per_s, 'FLOP/s')}`
      : `${p.pipeline}, length ${count(p.seqlen)}: modelled ${si(p.predicted_s, 's')}, ${si(p.flops / p.predicted_s, 'FLOP/s')}`;
  }
  function showRoofline() {
    const list = rooflinePoints(shown);
    const spec = rooflineSpec(data.figures, shown, list);
    chart = drawRoofline($('roofline'), chart, spec, describe);
    $('roofline').setAttribute('aria-label', `Log-log roofline for ${shown}: ridge at ${plain(spec.ridge.x)} FLOP per byte. `
      + list.filter((p) => p.measured).map((p) => describe(p)).join('; ')
      + '. The table "Predicted beside measured" holds the same figures.');
    const outside = list.filter((p) => !p.measured && p.cap >= spec.ymax).length;
    $('roofline-note').textContent = 'Each point is one length of one pipeline: further right, more FLOPs for each byte that the model '
      + 'counts. Error bars span the 10th to 90th percentile. '
      + (outside ? `A short cap above a hollow point is what launches alone would allow; ${outside} lie above this chart `
        + `(a launch costs ${si(data.figures.launch_s, 's')}).` : 'A short cap above a hollow point is what launches alone would allow.');
    for (const button of $('dtypes').children) button.setAttribute('aria-pressed', String(button.dataset.dtype === shown));
  }
  if (points.length) {
    $('dtypes').append(...dtypes.map((dtype) => {
      const button = el('button', {type: 'button', 'data-dtype': dtype}, dtype);
      button.addEventListener('click', () => { shown = dtype; showRoofline(); });
      return button;
    }));
    $('legend').append(...PIPELINES.map((p) => el('li', {}, mark(p, true), mark(p), p)), el('li', {}, 'hollow: modelled, filled: measured'));
    showRoofline();
  }

  // ---- accuracy
  table($('accuracy'), [
    {head: 'dtype', once: true, cell: (a) => a.dtype},
    {head: 'pipeline', th: true, cell: (a) => el('span', {}, mark(a.pipeline), a.pipeline)},
    {head: 'largest error', numeric: true, cell: (a) => sci(a.max_abs_error)},
    {head: 'limit', numeric: true, cell: (a) => sci(a.limit)},
    {head: 'rms error / rms value', numeric: true, cell: (a) => sci(a.relative_rms_error)},
    {head: 'at [batch, row, head, column]', cell: (a) => `[${a.at.join(', ')}]`},
    {head: 'kernel', cell: (a) => a.kernel},
    {head: '', cell: (a) => (a.ok ? 'within the limit' : 'over the limit'), odd: (a) => !a.ok},
  ], data.accuracy, (a) => a.dtype);
  $('accuracy-note').textContent = data.accuracy_note;

  // ---- method
  for (const [term, text] of data.method) $('method').append(el('dt', {}, term), el('dd', {}, text));

  // ---- any shape, any device
  const devices = data.devices;
  for (const [index, device] of devices.entries()) $('device').append(el('option', {value: index}, device.title));
  for (const dtype of ['f32', 'bf16', 'f16', 'e4m3', 'int8']) $('dtype').append(el('option', {value: dtype}, dtype));
  $('head-dim').value = data.shape.head_dim;
  $('heads').value = data.shape.heads_q;
  $('heads-kv').value = data.shape.heads_kv;
  $('batch').value = data.shape.batch;
  let modelChart = null;
  const length = () => Math.round(Math.pow(2, Number($('length').value) / 2));
  const whole = (id) => {
    const input = $(id), value = Math.round(Number(input.value));
    return Math.min(Math.max(value || 1, Number(input.min)), Number(input.max));
  };
  function recompute() {
    const device = devices[Number($('device').value)] || devices[0];
    const dtype = $('dtype').value;
    const problem = {batch: whole('batch'), headsQ: whole('heads'), headsKv: whole('heads-kv'), seqlenQ: length(),
      seqlenKv: length(), headDim: whole('head-dim'), headDimV: whole('head-dim'), dtype, causal: $('causal').checked};
    $('length-out').textContent = count(problem.seqlenQ);
    const note = [];
    if (problem.headsQ % problem.headsKv !== 0) note.push('KV heads must divide the heads.');
    const rows = PIPELINES.map((pipeline) => {
      const cost = RafterModel.attentionCost({...problem, pipeline});
      return {pipeline, cost, p: RafterModel.predict(cost, device.figures, dtype)};
    });
    if (rows[0].p.error) note.push(`${device.title}: ${rows[0].p.error}.`);
    if (!(device.figures.launch_s > 0)) note.push('No launch cost is stated for this device: dispatch is left out.');
    const bad = rows[0].p.error || problem.headsQ % problem.headsKv !== 0;
    table($('model'), [
      {head: 'pipeline', th: true, cell: (r) => el('span', {}, mark(r.pipeline, true), r.pipeline)},
      {head: 'time', numeric: true, cell: (r) => si(r.p.seconds, 's')},
      {head: 'wall', cell: (r) => r.p.wall},
      {head: 'attainable', numeric: true, cell: (r) => si(r.p.attainable, 'FLOP/s')},
      {head: 'FLOP/B', numeric: true, cell: (r) => plain(r.cost.intensity)},
      {head: 'ridge', numeric: true, cell: (r) => plain(r.p.ridge)},
      {head: 'FLOPs', numeric: true, cell: (r) => si(r.cost.flops, '')},
      {head: 'bytes', numeric: true, cell: (r) => si(r.cost.bytes, 'B')},
    ], bad ? [] : rows);
    $('model-note').textContent = note.join(' ');
    if (bad) {
      if (modelChart) { modelChart.destroy(); modelChart = null; }
      return;
    }
    const list = rows.map((r) => ({pipeline: r.pipeline, x: r.cost.intensity, y: r.cost.flops / r.p.seconds, measured: false,
      cap: r.p.dispatch > 0 ? r.cost.flops / r.p.dispatch : 0, label: r.pipeline,
      side: {'unfused': 'left', 'half-fused': 'below', 'fused': 'above'}[r.pipeline], source: r}));
    const text = (point) => `${point.source.pipeline}: ${si(point.source.p.seconds, 's')}, ${si(point.y, 'FLOP/s')}`;
    modelChart = drawRoofline($('model-roofline'), modelChart, rooflineSpec(device.figures, dtype, list), text);
    $('model-roofline').setAttribute('aria-label', `Roofline of ${device.title}, ${dtype}. ${list.map(text).join('; ')}.`);
  }
  $('panel').addEventListener('input', recompute);
  $('panel').addEventListener('submit', (event) => event.preventDefault());
  recompute();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { if (points.length) showRoofline(); recompute(); });
})();
