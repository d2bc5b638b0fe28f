// What the pages build themselves from: elements, marks, tables, numbers as text. Text goes in as
// text, never as markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== '') node.setAttribute(name, value);
  }
  node.append(...children.map((c) => (c instanceof Node ? c : String(c))));
  return node;
}
const MARK_PATHS = {'unfused': 'M7 1.5 L13 12.5 H1 Z', 'half-fused': 'M7 1 L13 7 L7 13 L1 7 Z',
  'fused': 'M7 2 A5 5 0 1 1 6.99 2 Z'};
Object.assign(MARK_PATHS, {'products': MARK_PATHS['unfused'], 'elementwise': MARK_PATHS['half-fused'],
  'attention': MARK_PATHS['fused']});
function mark(pipeline, hollow) {
  const ns = 'http://www.w3.org/2000/svg';
  const svg = document.createElementNS(ns, 'svg');
  svg.setAttribute('class', 'mark');
  svg.setAttribute('viewBox', '0 0 14 14');
  svg.setAttribute('aria-hidden', 'true');
  const shape = document.createElementNS(ns, 'path');
  shape.setAttribute('d', MARK_PATHS[pipeline]);
  shape.setAttribute('fill', hollow ? 'none' : `var(--${pipeline})`);
  shape.setAttribute('stroke', `var(--${pipeline})`);
  shape.setAttribute('stroke-width', '1.6');
  svg.append(shape);
  return svg;
}
// columns [{head, numeric, cell(row) → text | Node, why, words, th}]; words may wrap
function table(node, columns, rows, groupOf) {
  const head = el('tr', {}, ...columns.map((c) => el('th', {class: c.numeric ? 'n' : '', scope: 'col'}, c.head)));
  let group;
  const body = rows.map((row) => {
    const next = groupOf ? groupOf(row) : undefined;
    const first = groupOf && next !== group;
    const tr = el('tr', {class: first ? 'group' : groupOf ? 'in-group' : ''});
    group = next;
    for (const c of columns) {
      const content = c.once && !first ? el('span', {class: 'repeat'}, c.cell(row)) : c.cell(row);
      tr.append(el(c.th ? 'th' : 'td', {class: [c.numeric && 'n', c.why && 'why', c.words && 'words', c.odd && c.odd(row) && 'odd']
        .filter(Boolean).join(' '), scope: c.th ? 'row' : ''}, content));
    }
    return tr;
  });
  node.replaceChildren(el('thead', {}, head), el('tbody', {}, ...body));
}
const percent = (x) => (isFinite(x) ? `${Math.round(100 * x)}%` : '–');
const sci = (x) => (x === null ? 'without bound' : x.toExponential(2));
const count = (n) => n.toLocaleString('en-US');

// The machine's ceilings, with their spread.
function showCeilings(node, data) {
  table(node, [
    {head: 'ceiling', th: true, cell: (c) => c.label},
    {head: 'value', numeric: true, cell: (c) => si(c.value, c.unit === '1' ? '' : c.unit)},
    {head: 'spread', numeric: true, cell: (c) => (c.samples ? percent(c.spread) : '–'), odd: (c) => c.noisy},
    {head: 'n', numeric: true, cell: (c) => (c.samples ? count(c.samples) : '–')},
  ], data.ceilings);
}
