// Parts that several views draw: numbers in words, bars, sliders, the state of a piece of work.

import { html, nothing } from './vendor/lit-html.js';
import { chosenModel, state, update } from './state.js';

export function percent(logprob) {
  if (logprob === null || logprob === undefined) return '–';
  const share = Math.exp(logprob) * 100;
  if (share > 0 && share < 0.1) return '< 0.1 %';
  return `${share.toFixed(share >= 99.95 || share === 0 ? 0 : 1)} %`;
}

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

export function bytes(count) {
  if (count === null || count === undefined) return '–';
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toPrecision(3)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return '–';
  return value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

// Text of a piece for a person: a space and a line break are visible, nothing is empty.
export function visible(piece) {
  if (piece === '') return '∅';
  return piece.replace(/^ /, '▁').replaceAll('\n', '⏎').replaceAll('\t', '⇥');
}

const RIGHT_TO_LEFT = /^[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

// Direction of a text by its first letter. dir="auto" would find the same, but again for each element that is added:
// quadratic in the length of an answer.
export function direction(text) {
  return RIGHT_TO_LEFT.test(text.match(/\p{L}/u)?.[0] ?? '') ? 'rtl' : 'ltr';
}

export function bar(share, kind = '') {
  const width = Math.max(0, Math.min(1, share ?? 0)) * 100;
  return html`<span class="bar ${kind}" aria-hidden="true"><span .style=${`width: ${width}%`}></span></span>`;
}

// control: {key, label, min, max, step, off, offText, show}; values: an object that holds the value under the key.
// off: the value without effect, offText: its name, show: a value in words.
export function slider(control, values, changed) {
  const id = `control-${control.key}`;
  const value = values[control.key];
  const isOff = value === control.off;
  const words = isOff && control.offText ? control.offText : (control.show?.(value) ?? value);
  return html`<div class="slider ${isOff ? 'off' : ''}">
    <label for=${id}>${control.label}</label>
    <output for=${id}>${words}</output>
    <input
      id=${id}
      type="range"
      min=${control.min}
      max=${control.max}
      step=${control.step}
      .value=${String(value)}
      aria-valuetext=${words}
      @input=${(event) => {
        values[control.key] = Number(event.target.value);
        changed();
        update();
      }}
    />
  </div>`;
}

export function textBox({ id, label, value, rows = 3, placeholder = '', input }) {
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <textarea
      id=${id}
      rows=${rows}
      dir="auto"
      spellcheck="false"
      placeholder=${placeholder}
      .value=${value}
      @input=${(event) => input(event.target.value)}
    ></textarea>
  </div>`;
}

// Text that all views share.
export function sharedText(label, changed, more = {}) {
  return textBox({
    id: 'text',
    label,
    value: state.text,
    placeholder: 'Type here …',
    input: (value) => {
      state.text = value;
      changed();
      update();
    },
    ...more,
  });
}

// What a view shows in place of results, or above them.
export function face(work, empty) {
  if (work.status === 'empty') return empty === nothing ? nothing : html`<p class="notice" role="status">${empty}</p>`;
  if (work.status === 'cancelled') return html`<p class="notice" role="status">Stopped.</p>`;
  if (work.status !== 'failed') return nothing;
  return problemBox(work.problem, work.retryInS);
}

export function problemBox(problem, retryInS = null) {
  const retry = retryInS === null ? nothing : html`<p>Next try in ${retryInS} s.</p>`;
  return html`<div class="problem" role="alert">
    <p><strong>${titleOf(problem)}</strong> ${problem.message}</p>
    ${retry}
  </div>`;
}

function titleOf(problem) {
  switch (problem.code) {
    case 'RESOURCE_EXHAUSTED':
      return 'The server is full.';
    case 'UNAVAILABLE':
      return 'The server is not there.';
    case 'INVALID_ARGUMENT':
      return 'The server cannot use this.';
    case 'UNIMPLEMENTED':
      return 'This model cannot do this.';
    case 'NOT_FOUND':
      return 'There is no such model.';
    default:
      return `${problem.code}.`;
  }
}

// Returns a notice if the chosen model has another architecture than a view needs; null if it fits.
export function unfit(architectures, what) {
  const model = chosenModel();
  if (model === null || architectures.includes(model.architecture)) return null;
  return html`<p class="notice" role="status">
    ${model.name} is an ${model.architecture} model. ${what} needs ${architectures.join(' or ')} models.
  </p>`;
}

export function figure(label, value, hint = '') {
  return html`<div class="figure" title=${hint}><dt>${label}</dt><dd>${value}</dd></div>`;
}
