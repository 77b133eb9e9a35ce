// Targets as they are generated, each token shaded by its probability. A token's alternatives continue from there.

import { post, postLines } from '../api.js';
import { bar, bytes, direction, face, figure, percent, seconds, sharedText, slider, unfit, visible } from '../parts.js';
import { asked, chosenModel, state, update } from '../state.js';
import { guard } from '../vendor/directives/guard.js';
import { html, nothing } from '../vendor/lit-html.js';
import { Work } from '../work.js';

const NUM_ALTERNATIVES = 8;
const ARCHITECTURES = ['encoder-decoder', 'decoder'];
const CONTROLS = [
  { key: 'beam_width', label: 'Beam width', min: 1, max: 8, step: 1, off: 1, offText: '1 (greedy)' },
  { key: 'num_return_sequences', label: 'Best outputs', min: 1, max: 8, step: 1, off: 1 },
  { key: 'length_penalty', label: 'Length penalty', min: -1, max: 3, step: 0.1, off: 1 },
];

const GROUP = 64;
const CURSOR = html`<span class="cursor" aria-hidden="true"></span>`;

const work = new Work();
const asking = new Work(); // for alternatives
const values = { beam_width: 1, num_return_sequences: 1, length_penalty: 1 };
let outputs = []; // {tokens, text, score, finish}
let kept = []; // tokens of the prefix that the person chose
let end = null;
let selected = null; // index of a token of the first output, the prefix included

function options() {
  // A beam search reports no alternatives of its tokens; they are asked for when a token is opened.
  const chosen = { num_logprobs: values.beam_width > 1 ? 0 : NUM_ALTERNATIVES };
  if (kept.length) chosen.prefix_ids = kept.map((token) => token.id);
  if (values.beam_width > 1) {
    chosen.beam_width = values.beam_width;
    chosen.num_return_sequences = Math.min(values.num_return_sequences, values.beam_width);
    chosen.length_penalty = values.length_penalty;
  }
  return chosen;
}

function start() {
  selected = null;
  if (!state.text.trim() && chosenModel()?.architecture !== 'decoder') {
    outputs = [];
    end = null;
    work.reset();
    return;
  }
  work.run(async (signal) => {
    outputs = [];
    end = null;
    for await (const event of postLines('/api/generate', asked({ options: options() }), signal)) {
      if (event.type === 'tokens') add(event);
      else end = event;
      update();
    }
  });
}

function add(event) {
  const output = (outputs[event.output] ??= { tokens: [], text: '', score: null, finish: null });
  output.text += event.text;
  output.tokens.push(...event.tokens.slice(0, event.num_tokens));
  output.score = event.score ?? output.score;
  output.finish = event.finish_reason ?? output.finish;
}

function startAgain() {
  kept = [];
  start();
}

function firstTokens() {
  return [...kept, ...(outputs[0]?.tokens ?? [])];
}

function choose(alternative) {
  const before = firstTokens();
  const chosen = { ...before[selected], id: alternative.id, piece: alternative.piece, logprob: alternative.logprob };
  kept = [...before.slice(0, selected), { ...chosen, isChosen: true }];
  start();
}

function select(index) {
  selected = selected === index ? null : index;
  const token = selected === null ? null : firstTokens()[selected];
  if (token && !token.alternatives.length) askAlternatives(token);
  update();
}

function askAlternatives(token) {
  const ids = firstTokens()
    .slice(0, selected)
    .map((one) => one.id);
  const body = asked({ options: { prefix_ids: ids }, num_tokens: NUM_ALTERNATIVES });
  asking.run(async (signal) => {
    const { tokens: likely, stages } = await post('/api/next-token', body, signal);
    token.alternatives = likely
      .slice(0, NUM_ALTERNATIVES)
      .map((one, index) => ({ ...one, logprob: stages[0].logprobs[index] }));
  });
}

function tokenButton(token, index) {
  const doubt = token.logprob === null ? 0 : 1 - Math.exp(token.logprob);
  const isOpen = index === selected;
  return html`<button
    type="button"
    class="token ${index < kept.length ? 'kept' : ''} ${token.isChosen ? 'chosen' : ''}"
    .style=${`--doubt: ${doubt.toFixed(4)}`}
    aria-expanded=${isOpen}
    aria-controls="alternatives"
    data-logprob=${token.logprob ?? nothing}
    data-id=${token.id}
    aria-label="${visible(token.piece)}, probability ${percent(token.logprob)}"
    @click=${() => select(index)}
    >${shownPiece(token.piece, index)}</button
  >`;
}

// Pieces as they stand in the text; the first one without the space that begins it.
function shownPiece(piece, index) {
  return (index ? piece : piece.trimStart()).replaceAll('\n', '⏎') || '∅';
}

// Groups of tokens: only groups that changed are drawn again, because an answer can have thousands of tokens.
function tokens() {
  const shown = firstTokens();
  if (!shown.length) return nothing;
  const groups = [];
  for (let start = 0; start < shown.length; start += GROUP)
    groups.push(group(shown.slice(start, start + GROUP), start));
  const text = shown.map((token) => token.piece).join('');
  return html`<p class="tokens" dir=${direction(text)} @keydown=${moveFocus}>
    ${groups}${work.status === 'running' ? CURSOR : nothing}
  </p>`;
}

function group(part, start) {
  const open = selected !== null && selected >= start && selected < start + GROUP ? selected : null;
  return guard([part[0], part.length, open, kept], () => part.map((token, at) => tokenButton(token, start + at)));
}

// Arrow keys move along the tokens, as in a text.
function moveFocus(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === 'Escape' && selected !== null) select(selected);
  if (step === undefined) return;
  const buttons = [...event.currentTarget.querySelectorAll('.token')];
  buttons[buttons.indexOf(document.activeElement) + step]?.focus();
  event.preventDefault();
}

function alternatives() {
  const token = selected === null ? null : firstTokens()[selected];
  if (!token) return nothing;
  return html`<section id="alternatives" class="card" aria-label="Alternatives of ${visible(token.piece)}">
    <h2>Instead of “${visible(token.piece)}”</h2>
    ${face(asking, nothing)}
    <ul class="bars">
      ${token.alternatives.map(
        (one) =>
          html`<li
            ><button type="button" data-id=${one.id} ?disabled=${one.id === token.id} @click=${() => choose(one)}>
              <span class="piece" dir="auto">${visible(one.piece)}</span>${bar(Math.exp(one.logprob))}
              <span class="number">${percent(one.logprob)}</span></button
            ></li
          >`,
      )}
    </ul>
  </section>`;
}

function others() {
  if (outputs.length < 2) return nothing;
  return html`<section class="card"
    ><h2>All outputs, best first</h2>
    <ol class="outputs"
      >${outputs.map(
        (one) =>
          html`<li><span dir="auto">${one.text}</span> <span class="number">${one.score?.toFixed(3)}</span></li>`,
      )}</ol
    ></section
  >`;
}

function cost() {
  if (end === null) return nothing;
  const { usage, timing } = end;
  const rate = timing?.total_s ? usage.generated_tokens / timing.total_s : null;
  const blockBytes = chosenModel()?.cache?.block_bytes ?? null;
  const blocks = blockBytes ? `${usage.cache_blocks} (${bytes(usage.cache_blocks * blockBytes)})` : usage.cache_blocks;
  return html`<dl class="figures">
    ${figure('Time to first token', seconds(timing?.time_to_first_token_s), 'on the server, from arrival')}
    ${figure('Tokens a second', rate === null ? '–' : Math.round(rate), 'generated tokens by total time')}
    ${figure('Tokens', `${usage.source_tokens} → ${usage.generated_tokens}`, 'source, generated')}
    ${figure('Cache blocks', blocks, 'largest number held at one time')}
  </dl>`;
}

function buttons() {
  const again = kept.length
    ? html`<button type="button" @click=${startAgain}>Without the chosen beginning</button>`
    : nothing;
  const stop = html`<button type="button" ?disabled=${work.status !== 'running'} @click=${() => work.cancel()}
    >Stop</button
  >`;
  return html`<div class="buttons">${stop}${again}</div>`;
}

export const translate = {
  title: 'Translate',
  changed(isShown) {
    kept = [];
    outputs = [];
    end = null;
    work.reset();
    if (isShown && ARCHITECTURES.includes(chosenModel()?.architecture)) start();
  },
  shown() {
    if (state.models.length && work.status === 'empty') translate.changed(true);
  },
  render() {
    const notice = unfit(ARCHITECTURES, 'Generation');
    if (notice) return notice;
    const isDecoder = chosenModel()?.architecture === 'decoder';
    return html`<div class="split">
      <div>
        ${sharedText(isDecoder ? 'Text to continue' : 'Text', startAgain, { rows: 5 })}
        <div class="sliders">${CONTROLS.map((control) => slider(control, values, start))}</div>
      </div>
      <div>
        ${buttons()}
        <section class="result" aria-label="Answer" aria-busy=${work.status === 'running'}>
          ${face(work, 'Type a text: the answer appears here while you type.')}${tokens()}
          <p class="hidden" role="status">${work.status === 'done' ? outputs[0]?.text : ''}</p>
        </section>
        ${alternatives()}${others()}${cost()}
        <p class="hint"
          >A darker token was less certain. Click one to see what else was likely there, and to go on with it.</p
        >
      </div>
    </div>`;
  },
};
