// What all views share: the server's models, the chosen one, its languages and the text. `update` renders the page.

export const state = {
  connection: 'connecting', // connecting, ready, gone
  problem: null,
  target: '',
  models: [],
  modelName: '',
  sourceLanguage: '',
  targetLanguage: '',
  view: 'translate',
  text: 'The weather is nice today, but it will rain tomorrow.',
};

export function chosenModel() {
  return state.models.find((model) => model.name === state.modelName) ?? state.models[0] ?? null;
}

export function asked(more = {}) {
  return {
    model: chosenModel()?.name ?? '',
    text: state.text,
    source_language: state.sourceLanguage,
    target_language: state.targetLanguage,
    ...more,
  };
}

const listeners = [];
let isPending = false;

export function onUpdate(listener) {
  listeners.push(listener);
}

// Renders once for all changes before the next frame: a stream can bring tokens faster than a screen shows them.
export function update() {
  if (isPending) return;
  isPending = true;
  requestAnimationFrame(() => {
    isPending = false;
    for (const listener of listeners) listener();
  });
}
