// The tree of a beam search, step by step: live beams, pruned ones, finished hypotheses.

import { postLines } from '../api.js';
import { face, sharedText, slider, unfit, visible } from '../parts.js';
import { asked, chosenModel, state, update } from '../state.js';
import { html, nothing, svg } from '../vendor/lit-html.js';
import { Work } from '../work.js';

const ARCHITECTURES = ['encoder-decoder', 'decoder'];
const CONTROLS = [
  { key: 'beam_width', label: 'Beam width', min: 2, max: 8, step: 1, off: null },
  { key: 'length_penalty', label: 'Length penalty', min: -1, max: 3, step: 0.1, off: 1 },
  { key: 'max_new_tokens', label: 'Longest output', min: 4, max: 64, step: 1, off: null },
];
const WIDEST_COLUMN = 104;
const NARROWEST_COLUMN = 72;
const ROW = 48;
const STEP_MS = 260;

const work = new Work();
const values = { beam_width: 4, length_penalty: 1, max_new_tokens: 32 };
let nodes = []; // {step, row, parent, piece, total, score, isFinished, reach}
let numSteps = 0;
let shown = 0; // last step that is drawn
let timer = null;
let outputs = [];
let column = WIDEST_COLUMN; // pixels of a step

function ask() {
  pause();
  if (!state.text.trim() && chosenModel()?.architecture !== 'decoder') {
    nodes = [];
    work.reset();
    return;
  }
  const options = { ...values, num_return_sequences: values.beam_width };
  work.run(async (signal) => {
    const found = [];
    for await (const event of postLines('/api/generate', asked({ options, report_beam_steps: true }), signal)) {
      if (event.type === 'tokens') {
        const output = (found[event.output] ??= { text: '', score: null });
        output.text += event.text;
        output.score = event.score ?? output.score;
      } else grow(event.beam_steps);
    }
    outputs = found;
    if (matchMedia('(prefers-reduced-motion: reduce)').matches) shown = numSteps - 1;
    else play();
  });
}

// Turns the steps into nodes. reach: last step at which a beam that continues the node lives; Infinity if one finished.
function grow(steps) {
  nodes = [];
  numSteps = steps.length;
  let before = [];
  steps.forEach((step, index) => {
    const place = (beam, row, isFinished) => ({
      step: index,
      row,
      parent: before[beam.parent] ?? null,
      piece: beam.piece,
      total: beam.total_logprob,
      score: beam.score,
      isFinished,
      reach: isFinished ? Infinity : index,
    });
    const live = step.live.map((beam, row) => place(beam, row, false));
    const finished = step.finished.map((beam, row) => place(beam, step.live.length + row, true));
    for (const node of [...live, ...finished]) {
      nodes.push(node);
      for (let one = node.parent; one !== null; one = one.parent) one.reach = Math.max(one.reach, node.reach);
    }
    before = live;
  });
  shown = 0;
  // The whole tree fits where there is room for it. The search can end before the page is drawn for the first time.
  const room = (document.getElementById('main') ?? document.body).clientWidth - 32;
  column = Math.max(NARROWEST_COLUMN, Math.min(WIDEST_COLUMN, room / numSteps));
}

function play() {
  pause();
  if (shown >= numSteps - 1) shown = 0;
  timer = setInterval(() => {
    shown += 1;
    if (shown >= numSteps - 1) pause();
    update();
  }, STEP_MS);
  update();
}

function pause() {
  clearInterval(timer);
  timer = null;
}

function bestPath() {
  const path = new Set();
  if (shown < numSteps - 1) return path;
  const finished = nodes.filter((node) => node.isFinished);
  const best = finished.sort((one, other) => other.score - one.score)[0] ?? null;
  for (let node = best; node !== null; node = node.parent) path.add(node);
  return path;
}

function tree() {
  const drawn = nodes.filter((node) => node.step <= shown);
  const path = bestPath();
  const height = (1 + Math.max(0, ...nodes.map((node) => node.row))) * ROW + 12;
  const label = `Beam search, step ${shown + 1} of ${numSteps}: ${drawn.length} beams so far`;
  return html`<div class="scroll tree" tabindex="0" role="region" aria-label="Tree of the search">
    <svg width=${(shown + 1) * column + 24} height=${height} role="img" aria-label=${label}>
      ${drawn.map((node) => edge(node, path))}${drawn.map((node) => mark(node, path))}
    </svg></div
  >`;
}

function kind(node, path) {
  const fate = node.isFinished ? 'finished' : node.reach < shown ? 'pruned' : 'live';
  return path.has(node) ? `${fate} best` : fate;
}

function at(node) {
  return [16 + node.step * column, 20 + node.row * ROW];
}

function edge(node, path) {
  if (node.parent === null) return nothing;
  const [x, y] = at(node);
  const [fromX, fromY] = at(node.parent);
  const middle = (fromX + x) / 2 + column / 4;
  const line = `M${fromX} ${fromY} C${middle} ${fromY} ${middle - column / 4} ${y} ${x} ${y}`;
  return svg`<path class="edge ${kind(node, path)}" d=${line} />`;
}

function mark(node, path) {
  const [x, y] = at(node);
  const text = visible(node.piece).replace(/^▁(?=.)/, '');
  const number = (node.score ?? node.total).toFixed(2);
  return svg`<g class="node ${kind(node, path)}"
    data-step=${node.step} data-total=${node.total} data-score=${node.score ?? nothing}>
    <circle cx=${x} cy=${y} r=${node.isFinished ? 6 : 4} />
    <text x=${x + 9} y=${y - 7}>${shortened(text)}</text>
    <text class="number" x=${x + 9} y=${y + 16}>${number}</text></g>`;
}

function shortened(text) {
  const most = Math.floor(column / 8.5);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function textOf(node) {
  const pieces = [];
  for (let one = node; one !== null; one = one.parent) pieces.unshift(one.piece);
  return pieces.join('').trim();
}

function beamsNow() {
  const live = nodes.filter((node) => node.step === shown && !node.isFinished);
  const finished = nodes
    .filter((node) => node.isFinished && node.step <= shown)
    .sort((one, other) => other.score - one.score);
  const row = (node) =>
    html`<tr
      ><td dir="auto">${textOf(node)}</td><td class="number">${node.total.toFixed(3)}</td>
      <td class="number">${node.score === null ? '' : node.score.toFixed(3)}</td></tr
    >`;
  const part = (title, found) =>
    found.length
      ? html`<tbody
          ><tr><th scope="rowgroup" colspan="3">${title}</th></tr> ${found.map(row)}</tbody
        >`
      : nothing;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Beams of this step"
    ><table class="beams"
      ><caption>Step ${shown + 1}</caption>
      <thead
        ><tr
          ><th scope="col">Text</th><th scope="col" class="number">Log-probability</th
          ><th scope="col" class="number">Score</th></tr
        ></thead
      >
      ${part('Live', live)}${part('Finished, best first', finished)}</table
    ></div
  >`;
}

function timeline() {
  return html`<div class="inline">
    <button
      type="button"
      @click=${() => {
        if (timer) {
          pause();
          update();
        } else play();
      }}
      >${timer ? 'Pause' : 'Play'}</button
    >
    <label class="grow nowrap"
      >Step ${shown + 1} of ${numSteps}
      <input
        id="step"
        type="range"
        min="0"
        max=${Math.max(0, numSteps - 1)}
        .value=${String(shown)}
        @input=${(event) => {
          pause();
          shown = Number(event.target.value);
          update();
        }}
    /></label>
  </div>`;
}

export const beams = {
  title: 'Beams',
  changed(isShown) {
    pause();
    nodes = [];
    outputs = [];
    work.reset();
    if (isShown && ARCHITECTURES.includes(chosenModel()?.architecture)) ask();
  },
  shown() {
    if (state.models.length) beams.changed(true);
  },
  hidden: pause,
  // The step that is shown is in sight.
  drawn(root) {
    const region = root.querySelector('.tree');
    if (region && region.dataset.shown !== String(shown)) region.scrollLeft = region.scrollWidth;
    if (region) region.dataset.shown = String(shown);
  },
  render() {
    const notice = unfit(ARCHITECTURES, 'Beam search');
    if (notice) return notice;
    const found = nodes.length ? html`${timeline()}${tree()}${beamsNow()}` : nothing;
    const texts =
      work.status === 'done' && outputs.length
        ? html`<section class="card"
            ><h2>Outputs, best first</h2>
            <ol class="outputs"
              >${outputs.map(
                (one) =>
                  html`<li
                    ><span dir="auto">${one.text}</span> <span class="number">${one.score?.toFixed(3)}</span></li
                  >`,
              )}</ol
            ></section
          >`
        : nothing;
    return html`${sharedText('Text', ask, { rows: 2 })}
      <div class="sliders">${CONTROLS.map((control) => slider(control, values, ask))}</div>
      ${face(work, 'Type a text to see its search.')}${found}${texts}
      <p class="hint"
        >Faded: pruned. Ring: finished. A number is the sum of the log-probabilities, of a finished hypothesis its
        score: the sum by a power of its length.</p
      >`;
  },
};
