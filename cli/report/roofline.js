// A log-log roofline on Chart.js: roofs and ridge with their labels, modelled points hollow, measured
// ones filled with error bars, the launch cost as a short cap above each modelled point.
const PIPELINE_MARK = {'unfused': 'triangle', 'half-fused': 'rectRot', 'fused': 'circle',
  'products': 'triangle', 'elementwise': 'rectRot', 'attention': 'circle'};

function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
}

// 1.5e11, 'FLOP/s' → '150 GFLOP/s'; three significant digits.
function si(value, unit) {
  if (value === null || value === undefined || !isFinite(value)) return '–';
  if (value === 0) return '0 ' + unit;
  const prefixes = [[1e18, 'E'], [1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k'], [1, ''],
    [1e-3, 'm'], [1e-6, 'µ'], [1e-9, 'n']];
  const rounded = Number(value.toPrecision(3));
  const [factor, prefix] = prefixes.find(([f]) => rounded >= f) || prefixes[prefixes.length - 1];
  const scaled = rounded / factor;
  const digits = scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
  return scaled.toFixed(digits) + '\u202f' + prefix + unit;
}
function plain(value, digits = 3) {
  if (value === null || value === undefined || !isFinite(value)) return '–';
  return Number(value.toPrecision(digits)).toLocaleString('en-US', {maximumFractionDigits: 6});
}

const decade = (x) => Math.pow(10, Math.floor(Math.log10(x)));

// What to draw: roofs [{label, peak} | {label, bandwidth}], ridge {x, label}, and points
// [{pipeline, x, y, low, high, cap, label, measured}].
function rooflineSpec(figures, dtype, points) {
  const peak = figures[`peak_${dtype}_flop_per_s`];
  const bandwidth = figures.bandwidth_bytes_per_s;
  const xs = points.map((p) => p.x).concat([peak / bandwidth]);
  const ys = points.flatMap((p) => [p.y, p.low, p.high]).filter((y) => y > 0);
  const xmin = Math.min(...xs) / 3, xmax = Math.max(...xs) * 3;
  const top = Math.max(peak, ...ys) * 4;
  const bottom = Math.min(...ys, bandwidth * Math.min(...xs)) / 2.5;
  const vector = figures.peak_vector_f32_flop_per_s;
  const roofs = [{label: `memory ${si(bandwidth, 'B/s')}`, bandwidth, main: true},
    {label: `${dtype} products ${si(peak, 'FLOP/s')}`, peak, main: true}];
  if (vector > 0 && Math.abs(Math.log(vector / peak)) > 0.05) {
    roofs.push({label: `f32 multiply-add ${si(vector, 'FLOP/s')}`, peak: vector});
  }
  for (const level of ['l3', 'l2']) {
    const rate = figures[`bandwidth_${level}_bytes_per_s`];
    if (rate > 0) roofs.push({label: `${level.toUpperCase()} ${si(rate, 'B/s')}`, bandwidth: rate});
  }
  const cache = ['l3', 'l2'].map((level) => [level.toUpperCase(), figures[`bandwidth_${level}_bytes_per_s`]])
    .find(([, rate]) => rate > bandwidth);
  const near = cache && {x: peak / cache[1], label: `from ${cache[0]}`};
  return {xmin, xmax, ymin: bottom, ymax: top, roofs, points, near,
    ridge: {x: peak / bandwidth, y: peak, label: `ridge ${plain(peak / bandwidth)} FLOP/B`}};
}

const rooflinePlugin = {
  id: 'rafterRoofline',
  beforeDatasetsDraw(chart) {
    const spec = chart.config.options.rafter;
    const {ctx, chartArea: area, scales: {x, y}} = chart;
    const small = area.width < 420;
    ctx.save();
    ctx.beginPath();
    ctx.rect(area.left, area.top, area.width, area.height);
    ctx.clip();
    ctx.font = `${small ? 11 : 12}px ${getComputedStyle(document.body).fontFamily}`;
    const peakMain = spec.roofs.find((r) => r.peak && r.main).peak;
    for (const roof of spec.roofs) {
      ctx.strokeStyle = cssColour('roof');
      ctx.fillStyle = cssColour('quiet');
      ctx.lineWidth = roof.main ? 2 : 1;
      ctx.setLineDash(roof.main ? [] : [3, 4]);
      ctx.beginPath();
      if (roof.peak) {
        const from = roof.main ? Math.max(spec.xmin, spec.ridge.x) : spec.xmin;
        ctx.moveTo(x.getPixelForValue(from), y.getPixelForValue(roof.peak));
        ctx.lineTo(area.right, y.getPixelForValue(roof.peak));
        ctx.stroke();
        const above = roof.main ? peakMain >= Math.max(...spec.roofs.map((r) => r.peak || 0)) : roof.peak > peakMain;
        ctx.textAlign = 'right';
        ctx.fillText(roof.label, area.right - 6, y.getPixelForValue(roof.peak) + (above ? -6 : 15));
      } else {
        const end = Math.min(peakMain / roof.bandwidth, spec.xmax);
        ctx.moveTo(x.getPixelForValue(spec.xmin), y.getPixelForValue(spec.xmin * roof.bandwidth));
        ctx.lineTo(x.getPixelForValue(end), y.getPixelForValue(end * roof.bandwidth));
        ctx.stroke();
        const first = Math.max(spec.xmin, spec.ymin / roof.bandwidth);
        if (end > first && (roof.main || !small)) {
          const dx = x.getPixelForValue(end) - x.getPixelForValue(first);
          const dy = y.getPixelForValue(end * roof.bandwidth) - y.getPixelForValue(first * roof.bandwidth);
          if (Math.hypot(dx, dy) > ctx.measureText(roof.label).width + 24) {
            ctx.save();
            ctx.translate(x.getPixelForValue(first), y.getPixelForValue(first * roof.bandwidth));
            ctx.rotate(Math.atan2(dy, dx));
            ctx.textAlign = 'left';
            ctx.fillText(roof.label, 12, -6);
            ctx.restore();
          }
        }
      }
    }
    if (spec.near) {  // what sits in a cache meets the compute roof left of the ridge too
      ctx.setLineDash([3, 4]);
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(x.getPixelForValue(Math.max(spec.xmin, spec.near.x)), y.getPixelForValue(peakMain));
      ctx.lineTo(x.getPixelForValue(spec.ridge.x), y.getPixelForValue(peakMain));
      ctx.stroke();
      const start = x.getPixelForValue(Math.max(spec.xmin, spec.near.x));
      if (x.getPixelForValue(spec.ridge.x) - start > ctx.measureText(spec.near.label).width + 16) {
        ctx.textAlign = 'left';
        ctx.fillText(spec.near.label, start + 6, y.getPixelForValue(peakMain) + 15);
      }
    }
    ctx.setLineDash([2, 4]);
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(x.getPixelForValue(spec.ridge.x), y.getPixelForValue(spec.ridge.y));
    ctx.lineTo(x.getPixelForValue(spec.ridge.x), area.bottom);
    ctx.stroke();
    const left = x.getPixelForValue(spec.ridge.x) > area.right - 130;
    ctx.textAlign = left ? 'right' : 'left';
    ctx.fillText(spec.ridge.label, x.getPixelForValue(spec.ridge.x) + (left ? -6 : 6), area.bottom - 8);
    ctx.restore();
  },
  afterDatasetsDraw(chart) {
    const spec = chart.config.options.rafter;
    const {ctx, chartArea: area, scales: {x, y}} = chart;
    ctx.save();
    ctx.font = `${area.width < 420 ? 11 : 12}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textAlign = 'center';
    for (const point of spec.points) {
      const px = x.getPixelForValue(point.x), py = y.getPixelForValue(point.y);
      ctx.strokeStyle = ctx.fillStyle = cssColour(point.pipeline);
      ctx.lineWidth = 1.5;
      if (point.measured) {
        ctx.beginPath();
        ctx.moveTo(px, y.getPixelForValue(point.low));
        ctx.lineTo(px, y.getPixelForValue(point.high));
        for (const end of [point.low, point.high]) {
          ctx.moveTo(px - 4, y.getPixelForValue(end));
          ctx.lineTo(px + 4, y.getPixelForValue(end));
        }
        ctx.stroke();
      } else if (point.cap > spec.ymin && point.cap < spec.ymax) {
        ctx.lineWidth = 2;
        ctx.beginPath();
        ctx.moveTo(px - 7, y.getPixelForValue(point.cap));
        ctx.lineTo(px + 7, y.getPixelForValue(point.cap));
        ctx.stroke();
      }
      if (point.label) {
        const width = ctx.measureText(point.label).width;
        const side = point.side === 'left' && px - 12 - width < area.left ? 'below' : point.side;
        const beside = {left: -12, right: 12}[side] || 0;
        ctx.textAlign = beside < 0 ? 'right' : beside > 0 ? 'left' : 'center';
        const at = beside ? px + beside : Math.min(Math.max(px, area.left + width / 2), area.right - width / 2);
        const under = point.measured ? Math.max(24, y.getPixelForValue(point.low) - py + 16) : 24;
        ctx.fillText(point.label, at, py + (beside ? 4 : side === 'above' ? -14 : under));
      }
    }
    ctx.restore();
  },
};

function rooflineDatasets(points) {
  const sets = [];
  for (const pipeline of Object.keys(PIPELINE_MARK)) {
    for (const measured of [false, true]) {
      const data = points.filter((p) => p.pipeline === pipeline && p.measured === measured);
      if (data.length === 0) continue;
      const colour = cssColour(pipeline);
      sets.push({
        label: `${pipeline}, ${measured ? 'measured' : 'modelled'}`, data, pointStyle: PIPELINE_MARK[pipeline],
        borderColor: colour, backgroundColor: measured ? colour : cssColour('paper'),
        pointBorderWidth: measured ? 1 : 2, radius: measured ? 5.5 : 6, hoverRadius: 8, order: measured ? 0 : 1,
      });
    }
  }
  return sets;
}

// Ticks at powers of ten; at 2 and 5 times them too on a short axis, at every other on a long one.
function logAxis(title, min, max, format) {
  const decades = Math.log10(max / min);
  const steps = decades < 2.5 ? [1, 2, 5] : [1];
  const values = [];
  for (let t = decade(min); t <= max; t *= 10) {
    if (decades > 7 && Math.round(Math.log10(t)) % 2) continue;
    for (const step of steps) if (step * t >= min && step * t <= max) values.push(step * t);
  }
  return {
    type: 'logarithmic', min, max, title: {display: true, text: title, color: cssColour('quiet')},
    grid: {color: cssColour('line'), borderColor: cssColour('quiet'), drawTicks: false},
    ticks: {color: cssColour('quiet'), padding: 6, maxRotation: 0, autoSkip: false, callback: format},
    afterBuildTicks(axis) { axis.ticks = values.map((value) => ({value})); },
  };
}

function drawRoofline(canvas, before, spec, describe) {
  if (before) before.destroy();
  return new Chart(canvas, {
    type: 'scatter',
    data: {datasets: rooflineDatasets(spec.points)},
    plugins: [rooflinePlugin],
    options: {
      animation: false, responsive: true, maintainAspectRatio: false, rafter: spec,
      scales: {
        x: logAxis('intensity, FLOP/B', spec.xmin, spec.xmax, (v) => plain(v)),
        y: logAxis('rate, FLOP/s', spec.ymin, spec.ymax, (v) => si(v, '').replace(/\.0+(?=\D)/, '')),
      },
      plugins: {legend: {display: false},
        tooltip: {displayColors: false, callbacks: {label: (item) => describe(item.raw)}}},
    },
  });
}
