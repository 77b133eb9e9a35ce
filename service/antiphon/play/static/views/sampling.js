// Distribution of the next token before and after every control, and samples with their seeds.

import { post, postLines } from '../api.js';
import { bar, face, percent, sharedText, slider, unfit, visible } from '../parts.js';
import { asked, chosenModel, state, update } from '../state.js';
import { html, nothing } from '../vendor/lit-html.js';
import { Work } from '../work.js';

const ARCHITECTURES = ['encoder-decoder', 'decoder'];
const NUM_TOKENS = 16;
const CONTROLS = [
  { key: 'temperature', label: 'Temperature', min: 0, max: 2, step: 0.05, off: 1 },
  { key: 'top_k', label: 'Top-k', min: 0, max: 50, step: 1, off: 0, offText: 'off' },
  { key: 'top_p', label: 'Top-p', min: 0.05, max: 1, step: 0.05, off: 1, offText: 'off' },
  { key: 'min_p', label: 'Min-p', min: 0, max: 0.5, step: 0.01, off: 0, offText: 'off' },
  { key: 'typical_p', label: 'Typical-p', min: 0.05, max: 1, step: 0.05, off: 1, offText: 'off' },
  { key: 'repetition_penalty', label: 'Repetition penalty', min: 0.5, max: 3, step: 0.05, off: 1, offText: 'off' },
  { key: 'presence_penalty', label: 'Presence penalty', min: -2, max: 5, step: 0.1, off: 0, offText: 'off' },
  { key: 'frequency_penalty', label: 'Frequency penalty', min: -2, max: 5, step: 0.1, off: 0, offText: 'off' },
];
const STAGES = {
  model: 'Model',
  logits_processors: 'Penalties',
  temperature: 'Temperature',
  top_k: 'Top-k',
  top_p: 'Top-p',
  min_p: 'Min-p',
  typical_p: 'Typical-p',
};

const distributing = new Work();
const drawing = new Work();
const values = Object.fromEntries(CONTROLS.map((control) => [control.key, control.off]));
const drawn = { count: 4, seed: '1' };
let distribution = null;
let walked = []; // tokens that the person has put after the prefix
let samples = [];

function options() {
  return Object.fromEntries(
    CONTROLS.filter((one) => one.key === 'temperature' || values[one.key] !== one.off).map((one) => [
      one.key,
      values[one.key],
    ]),
  );
}

function ask() {
  if (!state.text.trim() && chosenModel()?.architecture !== 'decoder') {
    distribution = null;
    distributing.reset();
    return;
  }
  const body = asked({ options: options(), generated_ids: walked.map((one) => one.id), num_tokens: NUM_TOKENS });
  distributing.run(async (signal) => {
    distribution = await post('/api/next-token', body, signal);
  });
}

function restart() {
  walked = [];
  samples = [];
  drawing.reset();
  ask();
}

function append(token) {
  walked = [...walked, token];
  ask();
}

function back() {
  walked = walked.slice(0, -1);
  ask();
}

function sample() {
  const first = BigInt(/^\d+$/.test(drawn.seed) ? drawn.seed : 0);
  const seeds = Array.from({ length: drawn.count }, (_, index) => String(BigInt.asUintN(64, first + BigInt(index))));
  samples = seeds.map((seed) => ({ seed, text: '' }));
  drawing.run((signal) => Promise.all(samples.map((one) => fill(one, signal))));
}

async function fill(one, signal) {
  const body = asked({ options: { ...options(), seed: one.seed } });
  for await (const event of postLines('/api/generate', body, signal)) {
    if (event.type === 'tokens') one.text += event.text;
    update();
  }
}

function table() {
  if (distribution === null) return nothing;
  const { tokens, stages } = distribution;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Distribution of the next token">
    <table class="stages">
      <caption>Probability of the next token after each stage. A dash: the token was dropped.</caption>
      <thead
        ><tr
          ><th scope="col">Token</th>${stages.map(
            (stage) =>
              html`<th scope="col"
                >${STAGES[stage.name] ?? stage.name}
                <small>${stage.num_kept.toLocaleString('en')} kept, ${stage.entropy.toFixed(2)} nats</small></th
              >`,
          )}</tr
        ></thead
      >
      <tbody
        >${tokens.map(
          (token, index) =>
            html`<tr>
              <th scope="row"
                ><button
                  type="button"
                  class="piece"
                  dir="auto"
                  data-id=${token.id}
                  title="put it after the text so far"
                  @click=${() => append(token)}
                  >${visible(token.piece)}</button
                ></th
              >
              ${stages.map((stage) => cell(stage, stage.logprobs[index]))}
            </tr>`,
        )}</tbody
      >
    </table>
  </div>`;
}

function cell(stage, logprob) {
  const isDropped = logprob === null;
  return html`<td class=${isDropped ? 'dropped' : ''} data-stage=${stage.name} data-logprob=${logprob ?? ''}>
    ${bar(isDropped ? 0 : Math.exp(logprob))}<span class="number">${isDropped ? '–' : percent(logprob)}</span></td
  >`;
}

function soFar() {
  if (!walked.length) return nothing;
  return html`<p class="walked"
    ><span>So far: <span dir="auto">${walked.map((one) => visible(one.piece)).join(' ')}</span></span>
    <button type="button" @click=${back}>Back</button></p
  >`;
}

function sampler() {
  return html`<section class="card"
    ><h2>Samples</h2>
    <form
      class="inline"
      @submit=${(event) => {
        event.preventDefault();
        sample();
      }}
    >
      <label
        >First seed
        <input
          id="seed"
          inputmode="numeric"
          pattern="[0-9]{1,20}"
          .value=${drawn.seed}
          @input=${(event) => {
            drawn.seed = event.target.value;
          }}
      /></label>
      <label
        >Samples
        <input
          id="count"
          type="number"
          min="1"
          max="8"
          .value=${String(drawn.count)}
          @input=${(event) => {
            drawn.count = Math.min(8, Math.max(1, Number(event.target.value) || 1));
          }}
      /></label>
      <button type="submit">Sample</button>
    </form>
    ${face(drawing, 'Each sample has a seed. The same seed gives the same text.')}
    <ol class="samples"
      >${samples.map(
        (one) =>
          html`<li><p class="number">seed ${one.seed}</p><p dir="auto" data-seed=${one.seed}>${one.text}</p></li>`,
      )}</ol
    >
  </section>`;
}

export const sampling = {
  title: 'Sampling',
  changed(isShown) {
    walked = [];
    samples = [];
    distribution = null;
    distributing.reset();
    drawing.reset();
    if (isShown && ARCHITECTURES.includes(chosenModel()?.architecture)) ask();
  },
  shown() {
    if (state.models.length) sampling.changed(true);
  },
  render() {
    const notice = unfit(ARCHITECTURES, 'Sampling');
    if (notice) return notice;
    return html`${sharedText('Text', restart, { rows: 2 })}
      <div class="sliders">${CONTROLS.map((control) => slider(control, values, ask))}</div>
      ${face(distributing, 'Type a text to see the distribution of its next token.')}${soFar()}${table()}${sampler()}`;
  },
};
