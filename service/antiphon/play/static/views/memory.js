// Memory of the server now, and what attention would need without fusion.

import { get, postLines, Problem } from '../api.js';
import { bytes, face, figure, slider } from '../parts.js';
import { chosenModel, state, update } from '../state.js';
import { html, nothing, svg } from '../vendor/lit-html.js';
import { Work } from '../work.js';

const POLL_MS = 1000;
const MOST_TRIES = 40;
const MINUTE = 60;
const GIB = 2 ** 30;
const LECTURE = [
  {
    key: 'log2T',
    label: 'Length T',
    min: 5,
    max: 17,
    step: 0.5,
    off: null,
    show: (value) => tokensOf(value).toLocaleString('en'),
  },
  { key: 'heads', label: 'Heads H', min: 1, max: 64, step: 1, off: null },
  { key: 'rows', label: 'Rows B', min: 1, max: 64, step: 1, off: null },
];
const MACHINES = [
  ['a phone', 8 * GIB],
  ['a laptop', 16 * GIB],
  ['an H100', 80 * GIB],
  ['a large server', 1024 * GIB],
];
const USES = { self: 'targets', cross: 'sources', free: 'free' };

const values = { log2T: 10, heads: 8, rows: 1 };
const measuring = new Work();
let found = null;
let problem = null;
let history = []; // {waiting, running} a second
let timer = null;

async function poll() {
  try {
    found = await get('/api/memory');
    problem = null;
    const now = metricsOfModel();
    history = [...history, { waiting: now?.waiting ?? 0, running: now?.running ?? 0 }].slice(-MINUTE);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    problem = error;
  }
  update();
}

function metricsOfModel() {
  return found?.metrics?.models[chosenModel()?.name] ?? null;
}

// Sources of 16, 32, ... tokens, one at a time, so that the workspace of each length is known. A busy server may encode
// a source together with others, which counts for no length: then it is sent again.
function measure() {
  const model = chosenModel();
  const runsOf = (length) => metricsOfModel()?.lone_runs?.[length] ?? 0;
  measuring.run(async (signal) => {
    for (let length = 16; length <= model.max_source_len; length *= 2) {
      const text = Array.from({ length: length - 1 }, () => 'a').join(' ');
      const body = { model: model.name, text, options: { max_new_tokens: 1 } };
      const before = runsOf(length);
      for (let tries = 0; tries < MOST_TRIES && runsOf(length) === before; tries += 1) {
        for await (const event of postLines('/api/generate', body, signal)) void event;
        await poll();
      }
    }
  });
}

function tokensOf(log2T) {
  return Math.round(2 ** log2T);
}

function fused(fit, tokens, rows) {
  return fit.a + rows * (fit.b * tokens + fit.c * tokens ** 2);
}

function lecture() {
  const T = tokensOf(values.log2T);
  const matrix = 4 * T ** 2;
  const layer = matrix * values.heads * values.rows;
  const fit = metricsOfModel()?.fit;
  const machines = [...MACHINES];
  const here = found?.metrics?.machine_bytes;
  if (here) machines.unshift(['the server’s machine', here]);
  return html`<section class="card"
    ><h2>What attention would need</h2>
    <div class="sliders">${LECTURE.map((control) => slider(control, values, () => {}))}</div>
    <dl class="figures">
      ${figure('T', T.toLocaleString('en'))} ${figure('One matrix, T² · 4 bytes', bytes(matrix))}
      ${figure('One layer, B · H matrices', bytes(layer))}
      ${fit?.a === undefined ? nothing : figure('Measured fit, fused', bytes(fused(fit, T, values.rows)), 'whole run')}
    </dl>
    <div class="scroll" tabindex="0" role="region" aria-label="Machines"
      ><table>
        <caption>Score matrices of one layer in float32</caption>
        <thead
          ><tr
            ><th scope="col">Machine</th><th scope="col" class="number">Memory</th><th scope="col">One layer</th
            ><th scope="col" class="number">Longest T</th></tr
          ></thead
        >
        <tbody
          >${machines.map(
            ([name, size]) =>
              html`<tr class=${layer <= size ? 'fits' : 'full'}
                ><th scope="row">${name}</th> <td class="number">${bytes(size)}</td
                ><td>${layer <= size ? 'fits' : 'does not fit'}</td>
                <td class="number"
                  >${Math.floor(Math.sqrt(size / (4 * values.heads * values.rows))).toLocaleString('en')}</td
                ></tr
              >`,
          )}
        </tbody></table
      ></div
    ></section
  >`;
}

const CHART = { width: 640, height: 300, left: 64, bottom: 36 };

function workspace() {
  const now = metricsOfModel();
  const rows = now?.workspace_by_length ?? [];
  const canMeasure = chosenModel()?.architecture === 'encoder-decoder';
  const button = canMeasure
    ? html`<button type="button" ?disabled=${measuring.status === 'running'} @click=${measure}>
        Measure lengths 16, 32, …</button
      >`
    : nothing;
  return html`<section class="card"
    ><h2>Workspace of the encoder by length</h2>
    ${rows.length ? chart(rows, now.fit) : html`<p class="notice">No source has been encoded alone yet.</p>`}
    <div class="buttons">${button}</div>${measuring.status === 'failed' ? face(measuring, '') : nothing}
    ${rows.length ? workspaceTable(rows) : nothing}</section
  >`;
}

function chart(rows, fit) {
  const longest = Math.max(...rows.map((row) => row.tokens), 64) * 2;
  const constant = rows.reduce((sum, row) => Math.max(sum, (row.predicted_materialised ?? 0) / row.tokens ** 2), 0);
  const all = rows
    .flatMap((row) => [row.measured, row.predicted_fused, row.predicted_materialised])
    .filter((value) => value > 0);
  const top = Math.max(...all, constant * longest ** 2) * 1.5;
  const low = Math.min(...all) / 2;
  const x = (tokens) => CHART.left + (Math.log2(tokens / 4) / Math.log2(longest / 4)) * (CHART.width - CHART.left - 12);
  const y = (size) => (CHART.height - CHART.bottom) * (1 - Math.log(size / low) / Math.log(top / low)) + 8;
  const line = (size) =>
    Array.from({ length: 33 }, (_, step) => 4 * (longest / 4) ** (step / 32))
      .filter((tokens) => size(tokens) >= low && size(tokens) <= top)
      .map((tokens) => `${x(tokens)},${y(size(tokens))}`)
      .join(' ');
  const ticks = [];
  for (let tokens = 8; tokens <= longest; tokens *= 4) ticks.push(tokens);
  const sizes = [];
  for (let size = 2 ** Math.ceil(Math.log2(low)); size <= top; size *= 16) sizes.push(size);
  return html`<figure
    ><svg
      class="chart"
      viewBox="0 0 ${CHART.width} ${CHART.height}"
      role="img"
      aria-label="Bytes by tokens: measured, predicted fused, and score matrices if stored"
    >
      ${ticks.map(
        (tokens) => svg`<text class="tick" x=${x(tokens)} y=${CHART.height - 10} text-anchor="middle">${tokens}</text>`,
      )}
      ${sizes.map(
        (size) => svg`<line class="grid" x1=${CHART.left} x2=${CHART.width - 12} y1=${y(size)} y2=${y(size)} />
      <text class="tick" x=${CHART.left - 8} y=${y(size) + 4} text-anchor="end">${bytes(size)}</text>`,
      )}
      ${constant ? svg`<polyline class="materialised" points=${line((tokens) => constant * tokens ** 2)} />` : nothing}
      ${fit?.a === undefined ? nothing : svg`<polyline class="fused" points=${line((size) => fused(fit, size, 1))} />`}
      ${rows.map((row) => svg`<circle class="measured" cx=${x(row.tokens)} cy=${y(row.measured)} r="5" />`)}</svg
    ><figcaption
      ><span class="legend measured">measured</span><span class="legend fused">predicted, fused: a whole run</span>
      <span class="legend materialised">score matrices of one layer, if stored: T²</span></figcaption
    ></figure
  >`;
}

function workspaceTable(rows) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Workspace by length"
    ><table>
      <caption>Mean of the runs of each length</caption>
      <thead
        ><tr
          ><th scope="col" class="number">Tokens</th><th scope="col" class="number">Runs</th>
          <th scope="col" class="number">Measured</th><th scope="col" class="number">Predicted, fused</th>
          <th scope="col" class="number">Matrices, if stored</th></tr
        ></thead
      >
      <tbody
        >${rows.map(
          (row) =>
            html`<tr
              data-tokens=${row.tokens}
              data-measured=${row.measured}
              data-fused=${row.predicted_fused}
              data-materialised=${row.predicted_materialised}
              ><th scope="row" class="number">${Math.round(row.tokens)}</th> <td class="number">${row.runs}</td
              ><td class="number">${bytes(row.measured)}</td> <td class="number">${bytes(row.predicted_fused)}</td
              ><td class="number">${bytes(row.predicted_materialised)}</td></tr
            >`,
        )}
      </tbody></table
    ></div
  >`;
}

function pool() {
  const model = chosenModel();
  const now = metricsOfModel();
  if (!model?.cache)
    return html`<section class="card"><h2>Cache</h2><p class="notice">${model?.name} has no cache.</p></section>`;
  const counts = now?.blocks ?? {};
  const caches = found?.caches?.filter((cache) => cache.model === model.name) ?? null;
  const reason =
    found?.caches_problem ??
    (caches === null ? 'Start with --admin-target to see which request holds which block.' : null);
  return html`<section class="card"
    ><h2>Cache blocks</h2>
    <dl class="figures"
      >${Object.entries(USES).map(([use, label]) => figure(label, counts[use] ?? '–'))}
      ${figure('Block', `${tokensOfBlock(model.cache)}, ${bytes(model.cache.block_bytes)}`)}
      ${figure('Requests', caches === null ? '–' : caches.reduce((sum, one) => sum + one.holders.length, 0))}</dl
    >
    ${(caches ?? [null]).map(
      (cache, index) =>
        html`<canvas class="pool" data-pool=${index} role="img" aria-label=${poolLabel(cache, counts)}></canvas>`,
    )}
    <p class="hint">${reason ?? 'A colour is a request; a darker square is a block of its source.'}</p>
  </section>`;
}

function tokensOfBlock(cache) {
  const source = `${cache.block_tokens} tokens`;
  return cache.target_block_tokens === cache.block_tokens ? source : `${source} or the state of one target`;
}

function poolLabel(cache, counts) {
  if (cache === null)
    return `${counts.self ?? 0} blocks of targets, ${counts.cross ?? 0} of sources, ${counts.free ?? 0} free`;
  const held = cache.holders.reduce((sum, one) => sum + one.source_blocks.length + one.target_blocks.length, 0);
  return `${held} of ${cache.num_blocks} blocks are held by ${cache.holders.length} requests`;
}

const SQUARE = 8;

function drawPool(canvas) {
  const caches = found?.caches?.filter((cache) => cache.model === chosenModel()?.name) ?? null;
  const cache = caches?.[Number(canvas.dataset.pool)] ?? null;
  const counts = metricsOfModel()?.blocks ?? {};
  const total = cache?.num_blocks ?? Object.values(counts).reduce((sum, count) => sum + count, 0);
  const perRow = Math.max(16, Math.floor((canvas.clientWidth || 640) / SQUARE));
  canvas.width = perRow * SQUARE;
  canvas.height = Math.max(1, Math.ceil(total / perRow)) * SQUARE;
  const context = canvas.getContext('2d');
  const square = (block, colour) => {
    context.fillStyle = colour;
    context.fillRect((block % perRow) * SQUARE + 1, Math.floor(block / perRow) * SQUARE + 1, SQUARE - 2, SQUARE - 2);
  };
  const free = getComputedStyle(canvas).color;
  for (let block = 0; block < total; block += 1) square(block, free);
  if (cache) {
    for (const holder of cache.holders) {
      const hue = (holder.request * 137.5) % 360;
      for (const block of holder.target_blocks) square(block, `hsl(${hue} 65% 58%)`);
      for (const block of holder.source_blocks) square(block, `hsl(${hue} 70% 40%)`);
    }
    return;
  }
  const self = counts.self ?? 0;
  for (let block = 0; block < self + (counts.cross ?? 0); block += 1)
    square(block, block < self ? 'hsl(250 55% 60%)' : 'hsl(33 85% 52%)');
}

function load() {
  const top = Math.max(1, ...history.flatMap((one) => [one.waiting, one.running]));
  const line = (key) =>
    history
      .map((one, at) => `${((MINUTE - history.length + at) / (MINUTE - 1)) * 100},${30 - (one[key] / top) * 30}`)
      .join(' ');
  const last = history.at(-1) ?? { waiting: 0, running: 0 };
  return html`<section class="card"
    ><h2>The last minute</h2>
    <dl class="figures">${figure('Running', last.running)}${figure('Waiting', last.waiting)}${figure('Peak', top)}</dl>
    <svg
      class="spark"
      viewBox="0 -1 100 32"
      preserveAspectRatio="none"
      role="img"
      aria-label="${last.running} requests run and ${last.waiting} wait; at most ${top} in the last minute"
    >
      <polyline class="fused" points=${line('running')} />
      <polyline class="materialised" points=${line('waiting')} />
    </svg>
    <p class="hint"
      ><span class="legend fused">running</span> <span class="legend materialised">waiting</span></p
    ></section
  >`;
}

function process() {
  const metrics = found?.metrics;
  const memory = metricsOfModel()?.memory ?? {};
  return html`<dl class="figures">
    ${figure('Resident memory', bytes(metrics?.resident_bytes))}
    ${figure('Of the machine', bytes(metrics?.machine_bytes))}
    ${Object.entries(memory).map(([kind, size]) => figure(kind, bytes(size)))}
    ${figure('Largest workspace', bytes(metricsOfModel()?.workspace_measured_max))}</dl
  >`;
}

export const memory = {
  title: 'Memory',
  changed() {
    history = [];
    measuring.reset();
  },
  shown() {
    clearInterval(timer);
    timer = setInterval(poll, POLL_MS);
    poll();
  },
  hidden() {
    clearInterval(timer);
  },
  render() {
    if (found === null)
      return html`<p class="notice" role="status">${problem?.message ?? 'Reading the server’s metrics …'}</p>`;
    const missing = found.metrics_problem
      ? html`<p class="problem" role="alert"> ${found.metrics_problem}. Name the address with --metrics-url.</p>`
      : nothing;
    return html`${missing}${process()}<div class="pair">${workspace()}${lecture()}</div
      ><div class="pair">${pool()}${load()}</div>`;
  },
  drawn(root) {
    for (const canvas of root.querySelectorAll('canvas[data-pool]')) drawPool(canvas);
  },
};
