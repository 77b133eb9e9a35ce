// Results of encoder heads: labels as bars, spans in the text, masks filled.

import { post } from '../api.js';
import { bar, face, percent, sharedText, textBox, unfit, visible } from '../parts.js';
import { asked, chosenModel, state, update } from '../state.js';
import { html, nothing } from '../vendor/lit-html.js';
import { Work } from '../work.js';

const TASKS = { classify: 'Classify', next_sentence: 'Next sentence', tag: 'Tag', fill_mask: 'Fill in' };
const ROUTES = { classify: 'classify', next_sentence: 'classify', tag: 'tag', fill_mask: 'fill-mask' };
const DELAY_MS = 150;

const work = new Work();
let task = null;
let pair = '';
let result = null; // {task, text, ...answer}
let timer = null;

function tasks() {
  return (chosenModel()?.tasks ?? []).map((one) => one.task).filter((name) => name in TASKS);
}

// What is missing from the texts before the server can be asked; null if nothing is.
function missing() {
  if (!state.text.trim()) return 'Type a text to read.';
  if (task === 'fill_mask' && !state.text.includes(chosenModel().mask_token))
    return `Insert ${chosenModel().mask_token} where a word is missing.`;
  if (task === 'next_sentence' && !pair.trim()) return 'Type the second text of the pair.';
  return null;
}

function ask() {
  clearTimeout(timer);
  const asking = task;
  const text = state.text;
  if (asking === null || missing() !== null) {
    result = null;
    work.reset();
    return;
  }
  const more =
    { next_sentence: { pair, next_sentence: true }, classify: { pair: pair.trim() ? pair : null } }[asking] ?? {};
  work.run(async (signal) => {
    const answer = await post(`/api/${ROUTES[asking]}`, asked(more), signal);
    result = { task: asking, text, ...answer };
  });
}

function askSoon() {
  clearTimeout(timer);
  timer = setTimeout(ask, DELAY_MS);
}

function choose(name) {
  task = name;
  result = null;
  ask();
}

function labels() {
  return html`<ul class="bars"
    >${result.labels.map(
      (one) =>
        html`<li data-label=${one.label} data-score=${one.score}
          ><span class="piece" dir="auto">${one.label}</span> ${bar(one.score)}<span class="number"
            >${percent(Math.log(one.score))}</span
          ></li
        >`,
    )}</ul
  >`;
}

// Offsets count code points, so the text is cut into code points.
function spans() {
  const points = Array.from(result.text);
  const plain = (start, end) => html`<span class="plain">${points.slice(start, end).join('')}</span>`;
  const parts = [];
  let place = 0;
  for (const span of result.spans) {
    parts.push(
      plain(place, span.start),
      html`<mark dir="auto" data-label=${span.label}
        >${plain(span.start, span.end)}<small>${span.label} ${percent(Math.log(span.score))}</small></mark
      >`,
    );
    place = span.end;
  }
  parts.push(plain(place));
  return html`<p class="marked" dir="auto">${parts}</p>
    ${result.spans.length ? nothing : html`<p class="hint">No span was found.</p>`}`;
}

function fillings() {
  return result.places.map(
    (place, index) =>
      html`<section class="card"
        ><h2>Mask ${index + 1}</h2
        ><ul class="bars"
          >${place.fillings.map(
            (one) =>
              html`<li
                ><span class="piece" dir="auto">${visible(one.text)}</span>${bar(one.score)}
                <span class="number">${percent(Math.log(one.score))}</span></li
              >`,
          )}</ul
        ></section
      >`,
  );
}

function insertMask() {
  const box = document.getElementById('text');
  const [start, end] = [box.selectionStart, box.selectionEnd];
  state.text = state.text.slice(0, start) + chosenModel().mask_token + state.text.slice(end);
  ask();
  update();
}

function answer() {
  if (result === null) return nothing;
  return { classify: labels, next_sentence: labels, tag: spans, fill_mask: fillings }[result.task]();
}

export const read = {
  title: 'Classify, tag, fill in',
  changed(isShown) {
    task = tasks()[0] ?? null;
    result = null;
    work.reset();
    if (isShown) ask();
  },
  shown() {
    if (state.models.length) read.changed(true);
  },
  hidden() {
    clearTimeout(timer);
  },
  render() {
    const notice = unfit(['encoder'], 'Reading a text');
    if (notice) return notice;
    if (!tasks().length)
      return html`<p class="notice" role="status">${chosenModel().name} has no head for these tasks.</p>`;
    const second =
      task === 'classify' || task === 'next_sentence'
        ? textBox({
            id: 'pair',
            label: 'Second text',
            value: pair,
            rows: 2,
            placeholder: 'none',
            input: (value) => {
              pair = value;
              askSoon();
              update();
            },
          })
        : nothing;
    const mask =
      task === 'fill_mask'
        ? html`<div class="buttons"
            ><button type="button" @click=${insertMask}>Insert ${chosenModel().mask_token}</button></div
          >`
        : nothing;
    return html`<div class="buttons" role="group" aria-label="Task"
        >${tasks().map(
          (name) =>
            html`<button type="button" aria-pressed=${name === task} @click=${() => choose(name)}
              >${TASKS[name]}</button
            >`,
        )}</div
      >
      <div class="pair">${sharedText('Text', askSoon, { rows: 3 })}${second}</div>${mask}
      ${face(work, missing() ?? nothing)}${answer()}`;
  },
};
