// The frame of the page: models, languages, state of the connection, and the view that the address names.

import { get, Problem } from './api.js';
import { problemBox } from './parts.js';
import { chosenModel, onUpdate, state, update } from './state.js';
import { html, nothing, render } from './vendor/lit-html.js';
import { attention } from './views/attention.js';
import { beams } from './views/beams.js';
import { memory } from './views/memory.js';
import { read } from './views/read.js';
import { sampling } from './views/sampling.js';
import { translate } from './views/translate.js';
import { SERVER_GONE } from './work.js';

// Each has title, render(), and optionally drawn(), shown(), hidden() and changed() for another model or language.
const VIEWS = { translate, sampling, attention, beams, memory, read };
const POLL_MS = 5000;
const POLL_GONE_MS = 700;

const root = document.getElementById('app');
let timer = null;

function view() {
  return VIEWS[state.view];
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return; // until the page is seen again
  try {
    const found = await get('/api/models');
    const wasReady = state.connection === 'ready';
    const before = chosenModel()?.name;
    Object.assign(state, { target: found.target, models: found.models, connection: 'ready', problem: null });
    const model = chosenModel();
    state.modelName = model?.name ?? '';
    if (!wasReady || before !== state.modelName) chosen();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    state.problem = error;
    state.connection = 'gone';
  } finally {
    update();
    clearTimeout(timer);
    timer = setTimeout(poll, state.connection === 'ready' ? POLL_MS : POLL_GONE_MS);
  }
}

// Another model, other languages, or a server that is back.
function chosen() {
  for (const one of Object.values(VIEWS)) one.changed?.(one === view());
}

function route() {
  const named = location.hash.replace(/^#\/?/, '');
  const name = named in VIEWS ? named : 'translate';
  view().hidden?.();
  state.view = name;
  view().shown?.();
  document.title = `${view().title} – Antiphon`;
  update();
}

function choose(key) {
  return (event) => {
    state[key] = event.target.value;
    chosen();
    update();
  };
}

function option(value, label, current) {
  return html`<option value=${value} ?selected=${value === current}>${label}</option>`;
}

function chooser(key, label, values) {
  return html`<label class="chooser"
    ><span>${label}</span>
    <select @change=${choose(key)}
      >${values.map(([value, text]) => option(value, text, state[key]))}</select
    ></label
  >`;
}

function languages(model) {
  if (!model?.languages.length) return nothing;
  const codes = [['', 'default'], ...model.languages.map((code) => [code, code])];
  const target = model.architecture === 'encoder-decoder' ? chooser('targetLanguage', 'To', codes) : nothing;
  return html`${chooser('sourceLanguage', 'From', codes)}${target}`;
}

function status() {
  const words = { connecting: 'connecting', ready: state.target, gone: 'server gone, trying again' };
  return html`<p class="status ${state.connection}" role="status">${words[state.connection]}</p>`;
}

function header() {
  const model = chosenModel();
  const names = state.models.map((one) => [one.name, `${one.name} (${one.architecture}, ${one.precision})`]);
  return html`<header class="top">
    <p class="brand"><img src="icon.svg" alt="" width="28" height="28" />Antiphon</p>
    <div class="choosers">${names.length ? chooser('modelName', 'Model', names) : nothing}${languages(model)}</div>
    ${status()}
  </header>`;
}

function navigation() {
  return html`<nav aria-label="Views"
    ><ul>
      ${Object.entries(VIEWS).map(
        ([name, one]) =>
          html`<li>
            <a href="#/${name}" aria-current=${name === state.view ? 'page' : nothing}>${one.title}</a>
          </li>`,
      )}
    </ul></nav
  >`;
}

function page() {
  const gone = state.connection === 'gone' ? problemBox(state.problem) : nothing;
  const content = state.models.length ? view().render() : html`<p class="notice" role="status">Connecting …</p>`;
  const model = chosenModel();
  const credit = model?.attribution ? html`<footer>${creditOf(model)}</footer>` : nothing;
  return html`<a class="skip" href="#main" @click=${toMain}>Skip to the view</a>${header()}${navigation()}
    <main id="main" tabindex="-1"><h1 class="hidden">${view().title}</h1>${gone}${content}</main>${credit}`;
}

function creditOf(model) {
  const sources = model.attribution.split('\n');
  if (sources.length === 1) return html`${model.name}: ${model.attribution}`;
  return html`<details>
    <summary>${model.name}: sources and licences (${sources.length})</summary>
    <ul>
      ${sources.map((source) => html`<li>${source.replace(/^- /, '')}</li>`)}
    </ul>
  </details>`;
}

function toMain(event) {
  event.preventDefault();
  document.getElementById('main').focus();
}

onUpdate(() => {
  render(page(), root);
  if (state.models.length) view().drawn?.(root);
});

root.replaceChildren();
addEventListener('hashchange', route);
addEventListener(SERVER_GONE, poll);
document.addEventListener('visibilitychange', poll);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', update);
route();
update();
poll();
