// The page about a whole model: each step's operations, their timeline, their roofline, and the lower
// roofs of a prefill that lacks an idea.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const $ = (id) => document.getElementById(id);
  const CLASSES = ['products', 'attention', 'elementwise'];
  const redraw = [];

  // ---- head
  $('title').textContent = `Which wall does ${data.model.name} meet on ${data.machine.title}?`;
  $('subtitle').textContent = data.subtitle;
  document.title = `Rafter report: ${data.model.name} on ${data.machine.title}`;
  $('alerts').append(...data.alerts.map((text) => el('p', {class: 'alert'}, text)));

  // ---- one step
  function section(step) {
    const name = step.phase === 'prefill' ? `Prefill of ${count(step.seqlen)} tokens` : `Decode step at ${count(step.seqlen)} tokens`;
    const id = `step-${step.phase}`;
    const rows = el('table'), lines = el('canvas', {role: 'img'}), roof = el('canvas', {role: 'img'});
    $('steps').append(el('section', {'aria-labelledby': id},
      el('h2', {id}, `${name}, ${step.batch === 1 ? 'one sequence' : `${count(step.batch)} sequences`}, ${step.dtype}`),
      el('p', {}, summary(step)),
      el('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-labelledby': id}, rows),
      el('p', {class: 'quiet'}, 'Operations of one name together, over all layers. “Of bound” is the bound over the time measured.'),
      el('div', {class: 'pair'},
        el('div', {class: 'wide'}, el('div', {class: 'chart'}, lines),
          el('p', {class: 'quiet'}, `One layer of ${data.model.num_hidden_layers}: its operations in the order they run, each at its mean over the layers.`)),
        el('div', {class: 'chart'}, roof))));
    table(rows, [
      {head: 'operation', th: true, cell: (r) => el('span', {}, mark(r.class), r.operation)},
      {head: 'kernel', cell: (r) => r.kernel},
      {head: 'FLOPs', numeric: true, cell: (r) => si(r.flops, '')},
      {head: 'bytes', numeric: true, cell: (r) => si(r.bytes, 'B')},
      {head: 'launches', numeric: true, cell: (r) => count(r.launches)},
      {head: 'predicted', numeric: true, cell: (r) => si(r.predicted_time_s, 's')},
      {head: 'measured', numeric: true, cell: (r) => si(r.time_s, 's')},
      {head: 'of bound', numeric: true, cell: (r) => percent(r.share_of_bound), odd: (r) => r.share_of_bound > 1.1},
      {head: 'of step', numeric: true, cell: (r) => percent(r.share_of_step)},
      {head: 'wall, model', cell: (r) => r.wall_predicted},
      {head: 'wall, measured', cell: (r) => el('span', {title: r.wall_reason}, r.wall_measured)},
      {head: 'what would move it', words: true, cell: (r) => r.what_moves},
    ], step.operations);
    redraw.push(() => drawTimeline(lines, step), () => drawOperations(roof, step));
  }
  function summary(step) {
    const graph = step.time_graph_s !== null
      ? ` as a graph, ${si(step.time_stream_s, 's')} launch by launch (${count(step.launches_counted)} kernels counted)` : '';
    return `It takes ${si(step.time_graph_s ?? step.time_s, 's')}${graph}; predicted ${si(step.predicted_time_s, 's')}: `
      + `${step.verdict}. Its operations by themselves add up to ${si(step.timeline.operations_sum_s, 's')}.`;
  }

  // ---- timeline: bars from start to end, one row predicted and one measured
  const charts = new Map();
  function fresh(canvas, config) {
    if (charts.has(canvas)) charts.get(canvas).destroy();
    charts.set(canvas, new Chart(canvas, config));
  }
  function drawTimeline(canvas, step) {
    const bars = step.timeline.layer;
    const ends = bars.flatMap((b) => [b.start_s + b.time_s, b.predicted_start_s + b.predicted_s]);
    const sets = bars.map((bar) => ({
      label: bar.operation, backgroundColor: cssColour(bar.class), borderColor: cssColour('paper'), borderWidth: 1,
      grouped: false, barPercentage: 0.7,
      data: [{y: 'measured', x: [bar.start_s, bar.start_s + bar.time_s]},
        {y: 'predicted', x: [bar.predicted_start_s, bar.predicted_start_s + bar.predicted_s]}],
    }));
    fresh(canvas, {type: 'bar', data: {labels: ['measured', 'predicted'], datasets: sets}, options: {
      indexAxis: 'y', animation: false, responsive: true, maintainAspectRatio: false,
      scales: {
        x: {min: 0, max: Math.max(...ends), title: {display: true, text: 'time in the layer', color: cssColour('quiet')},
          grid: {color: cssColour('line')}, ticks: {color: cssColour('quiet'), callback: (v) => si(v, 's')}},
        y: {grid: {display: false}, ticks: {color: cssColour('quiet')}}},
      plugins: {legend: {display: false}, tooltip: {displayColors: false, callbacks: {
        title: () => '', label: (item) => `${item.dataset.label}: ${si(item.raw.x[1] - item.raw.x[0], 's')}`}}},
    }});
    canvas.setAttribute('aria-label', 'Timeline of one layer. ' + bars.map((b) =>
      `${b.operation}: predicted ${si(b.predicted_s, 's')}, measured ${si(b.time_s, 's')}`).join('; ') + '.');
  }

  // ---- roofline of the operations
  function drawOperations(canvas, step) {
    const points = step.operations.filter((r) => r.flops > 0).map((r) => ({pipeline: r.class, x: r.intensity_flop_per_byte,
      y: r.flop_per_s, low: r.flops / r.time_p90_s, high: r.flops / r.time_p10_s, measured: true, source: r}));
    const spec = rooflineSpec(data.figures, step.dtype, points);
    const text = (p) => `${p.source.operation}: ${si(p.source.time_s, 's')}, ${si(p.y, 'FLOP/s')}`;
    charts.set(canvas, drawRoofline(canvas, charts.get(canvas), spec, text));
    canvas.setAttribute('aria-label', `Roofline of the operations. ${points.map(text).join('; ')}.`);
  }

  // ---- lower roofs of a prefill
  const lengths = data.prefill_ceilings;
  $('length').max = lengths.length - 1;
  $('length').value = Math.max(0, lengths.findIndex((l) => l.seqlen === data.steps[0].seqlen));
  function drawRoofs() {
    const at = lengths[Number($('length').value)];
    $('length-out').textContent = count(at.seqlen);
    const x = at.intensity_flop_per_byte;
    const lacking = at.ceilings.filter((c) => c.name.startsWith('no '));
    const point = {pipeline: 'products', x, y: at.flop_per_s, measured: false, cap: 0, label: `prefill, ${count(at.seqlen)}`, source: at};
    const lowest = {...point, y: Math.min(at.flop_per_s, ...lacking.map((c) => c.flop_per_s)), label: '', hidden: true};
    const figures = {...data.figures, peak_vector_f32_flop_per_s: undefined};
    const spec = rooflineSpec(figures, data.dtype, [point, lowest]);
    spec.points = [point];
    // A kernel without matrix units meets a lower flat roof; one whose bytes are more meets a lower
    // slope, drawn where this prefill's own intensity meets it.
    for (const c of lacking) {
      spec.roofs.push(c.name === 'no tensor cores' ? {label: `${c.name} ${si(c.flop_per_s, 'FLOP/s')}`, peak: c.flop_per_s}
        : {label: `${c.name} ${si(c.flop_per_s, 'FLOP/s')}`, bandwidth: c.flop_per_s / x});
    }
    const text = (p) => `${count(p.source.seqlen)} tokens: ${si(p.source.predicted_time_s, 's')}, ${si(p.y, 'FLOP/s')}`;
    charts.set($('roofs'), drawRoofline($('roofs'), charts.get($('roofs')), spec, text));
    table($('roofs-table'), [
      {head: 'ceiling', th: true, cell: (c) => c.name},
      {head: 'rate', numeric: true, cell: (c) => si(c.flop_per_s, 'FLOP/s')},
      {head: 'time', numeric: true, cell: (c) => si(at.flops / c.flop_per_s, 's')},
      {head: 'what lifts it', words: true, cell: (c) => c.advice},
    ], at.ceilings);
    $('roofs-note').textContent = 'Each row: the least time of the step while its kernels lack the idea, all others applied.';
    $('roofs').setAttribute('aria-label', `Roofline of a prefill of ${count(at.seqlen)} tokens. `
      + at.ceilings.map((c) => `${c.name}: ${si(c.flop_per_s, 'FLOP/s')}`).join('; ') + '.');
  }
  $('length').addEventListener('input', drawRoofs);
  $('panel').addEventListener('submit', (event) => event.preventDefault());
  redraw.push(drawRoofs);

  // ---- ceilings, method
  showCeilings($('ceilings'), data);
  $('ceilings-note').textContent = data.ceilings_note;
  for (const [term, text] of data.method) $('method').append(el('dt', {}, term), el('dd', {}, text));

  for (const step of data.steps) section(step);
  const draw = () => redraw.forEach((f) => f());
  draw();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
})();
