// Every attention head as a small map, one of them enlarged, and the positions that the model knows.

import { post } from '../api.js';
import { drawShares, drawSigned, floats } from '../heatmap.js';
import { face, percent, sharedText, textBox, visible } from '../parts.js';
import { asked, chosenModel, state, update } from '../state.js';
import { html, nothing, svg } from '../vendor/lit-html.js';
import { Work } from '../work.js';

const STACKS = {
  cross: { title: 'Cross', queries: 'target_tokens', keys: 'source_tokens' },
  decoder_self: { title: 'Decoder', queries: 'target_tokens', keys: 'target_tokens' },
  encoder_self: { title: 'Encoder', queries: 'source_tokens', keys: 'source_tokens' },
};
const KINDS = {
  none: 'no positions',
  sinusoidal: 'sinusoidal vectors',
  learned: 'learned vectors',
  relative: 'relative bias (T5)',
  rotary: 'rotary (RoPE)',
  alibi: 'ALiBi',
  disentangled: 'disentangled (DeBERTa)',
};
const MOST_CELLS = 6000; // of a table; a larger map is a picture, because its table would take seconds to draw
const DELAY_MS = 250; // after the last key, because an explanation is expensive

const explaining = new Work();
const positioning = new Work();
let explanation = null;
let stack = 'cross';
let opened = null; // {layer, head}
let second = ''; // target, or second text of an encoder-only model
let encodings = [];
let timer = null;

function ask() {
  clearTimeout(timer);
  if (!state.text.trim()) {
    explanation = null;
    explaining.reset();
    return;
  }
  const isEncoder = chosenModel()?.architecture === 'encoder';
  const body = asked({ [isEncoder ? 'pair' : 'target']: second.trim() ? second : null });
  if (isEncoder) body.target_language = '';
  explaining.run(async (signal) => {
    const found = await post('/api/explain', body, signal);
    for (const name of Object.keys(STACKS)) for (const map of found[name]) map.values = floats(map.weights);
    explanation = found;
    if (!found[stack].length) stack = Object.keys(STACKS).find((name) => found[name].length) ?? stack;
    if (!openMap()) opened = null;
  });
}

function askSoon() {
  clearTimeout(timer);
  timer = setTimeout(ask, DELAY_MS);
}

function askPositions() {
  positioning.run(async (signal) => {
    const found = await post('/api/positions', { model: chosenModel()?.name ?? '', num_positions: 64 }, signal);
    encodings = found.encodings.map((one) => ({ ...one, table: floats(one.values) }));
  });
}

function openMap() {
  return explanation?.[stack].find((map) => map.layer === opened?.layer && map.head === opened?.head) ?? null;
}

function open(map) {
  const isSame = opened?.layer === map.layer && opened?.head === map.head;
  opened = isSame ? null : { layer: map.layer, head: map.head };
  update();
}

function nameOf(map) {
  return `layer ${map.layer}, head ${map.head}: ${map.pattern}, entropy ${map.entropy.toFixed(2)} nats`;
}

function layers() {
  const maps = explanation[stack];
  const rows = [];
  for (const map of maps) (rows[map.layer] ??= []).push(map);
  return rows.map(
    (heads, layer) =>
      html`<div class="layer"
        ><h2>Layer ${layer}</h2
        ><div class="heads">
          ${heads.map(
            (map) =>
              html`<button
                type="button"
                class="head"
                aria-pressed=${map === openMap()}
                @click=${() => open(map)}
                aria-label=${nameOf(map)}
              >
                <canvas data-map="${stack}/${map.layer}/${map.head}" aria-hidden="true"></canvas>
                <span class="name">${map.head} <em>${map.pattern}</em></span
                ><span class="number">${map.entropy.toFixed(2)}</span>
              </button>`,
          )}</div
        ></div
      >`,
  );
}

function enlarged() {
  const map = openMap();
  if (!map) return html`<p class="hint">Choose a head to enlarge it.</p>`;
  return html`<section class="card" aria-label="layer ${map.layer}, head ${map.head}">
    <h2>Layer ${map.layer}, head ${map.head}: ${map.pattern}</h2>
    <p class="hint"
      >A row is a query, a column a key. Entropy ${map.entropy.toFixed(3)} nats, of at most
      ${Math.log(map.columns).toFixed(3)}.</p
    >
    ${map.rows * map.columns > MOST_CELLS ? picture(map) : matrix(map)}
  </section>`;
}

function picture(map) {
  return html`<canvas
    class="large"
    data-map="${stack}/${map.layer}/${map.head}/large"
    role="img"
    aria-label="${map.rows} queries and ${map.columns} keys"
  ></canvas>`;
}

function matrix(map) {
  const queries = explanation[STACKS[stack].queries];
  const keys = explanation[STACKS[stack].keys];
  const columns = `grid-template-columns: max-content repeat(${map.columns}, minmax(1.1rem, 2rem))`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="weights">
    <div class="matrix" role="table" aria-label="Attention weights" .style=${columns}>
      <div role="row" class="row"
        ><span role="columnheader" class="corner">query</span>
        ${keys.map((piece) => html`<span role="columnheader" class="key" dir="auto">${visible(piece)}</span>`)}</div
      >
      ${queries.slice(0, map.rows).map((piece, row) => matrixRow(map, keys, piece, row))}
    </div>
  </div>`;
}

function matrixRow(map, keys, piece, row) {
  const weights = map.values.subarray(row * map.columns, (row + 1) * map.columns);
  return html`<div role="row" class="row"
    ><span role="rowheader" class="query" dir="auto">${visible(piece)}</span> ${Array.from(
      weights,
      (weight, column) =>
        html`<span
          role="cell"
          class="cell"
          .style=${`--weight: ${Math.sqrt(weight).toFixed(4)}`}
          title="${visible(piece)} → ${visible(keys[column])}: ${percent(Math.log(weight))}"
          data-weight=${weight}
          ><span class="hidden">${weight.toFixed(2)}</span></span
        >`,
    )}</div
  >`;
}

function stackChooser() {
  const names = Object.keys(STACKS).filter((name) => explanation[name].length);
  if (names.length < 2) return nothing;
  return html`<div class="buttons" role="group" aria-label="Attention"
    >${names.map(
      (name) =>
        html`<button
          type="button"
          aria-pressed=${name === stack}
          @click=${() => {
            stack = name;
            opened = null;
            update();
          }}
        >
          ${STACKS[name].title}</button
        >`,
    )}</div
  >`;
}

function decay(encoding) {
  const values = encoding.decay;
  if (!values.length) return nothing;
  const low = Math.min(0, ...values);
  const high = Math.max(...values, low + 1e-6);
  const points = values.map(
    (value, at) => `${(at / Math.max(1, values.length - 1)) * 100},${40 - ((value - low) / (high - low)) * 40}`,
  );
  return html`<svg
      class="decay"
      viewBox="-1 -2 102 44"
      role="img"
      preserveAspectRatio="none"
      aria-label="Effect by distance"
    >
      ${svg`<polyline points=${points.join(' ')} />`}
    </svg>
    <p class="hint"
      >Effect of a key by its distance: ${values[0].toFixed(2)} at 0, ${values.at(-1).toFixed(2)} at
      ${values.length - 1}.</p
    >`;
}

function position(encoding, index) {
  return html`<section class="card"
    ><h2>Positions of the ${encoding.part}: ${KINDS[encoding.kind] ?? encoding.kind}</h2> ${
      encoding.rows
        ? html`<canvas
            class="table"
            data-table=${index}
            role="img"
            aria-label="${encoding.rows} rows and ${encoding.columns} columns of ${KINDS[encoding.kind]}"
          ></canvas>`
        : nothing
    }
    ${decay(encoding)}</section
  >`;
}

function secondText() {
  const isEncoder = chosenModel()?.architecture === 'encoder';
  return textBox({
    id: 'second',
    label: isEncoder ? 'Second text of a pair' : 'Target',
    value: second,
    rows: 2,
    placeholder: isEncoder ? 'none' : 'the model’s own answer',
    input: (value) => {
      second = value;
      askSoon();
      update();
    },
  });
}

export const attention = {
  title: 'Attention',
  changed(isShown) {
    explanation = null;
    encodings = [];
    opened = null;
    explaining.reset();
    positioning.reset();
    if (isShown) attention.shown();
  },
  shown() {
    if (!state.models.length) return;
    ask();
    askPositions();
  },
  hidden() {
    clearTimeout(timer);
  },
  render() {
    const found =
      explanation === null ? nothing : html`${stackChooser()}<div class="layers">${layers()}</div>${enlarged()}`;
    return html`<div class="pair">${sharedText('Text', askSoon, { rows: 2 })}${secondText()}</div>
      ${face(explaining, 'Type a text to see where each head looks.')}${found} ${face(positioning, nothing)}<div
        class="pair"
        >${encodings.map(position)}</div
      >`;
  },
  drawn(root) {
    if (explanation !== null) {
      for (const map of explanation[stack]) {
        const name = `${stack}/${map.layer}/${map.head}`;
        for (const canvas of root.querySelectorAll(`canvas[data-map="${name}"], canvas[data-map="${name}/large"]`)) {
          drawShares(canvas, map.values, map.rows, map.columns);
        }
      }
    }
    for (const canvas of root.querySelectorAll('canvas[data-table]')) {
      const one = encodings[Number(canvas.dataset.table)];
      drawSigned(canvas, one.table, one.rows, one.columns);
    }
  },
};
