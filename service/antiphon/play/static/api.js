// Requests to the page's own server. An error of the model server is a Problem, whatever its form on the wire.

export class Problem extends Error {
  // found: {code, message, field, retry_after_s} as problems.py writes it.
  constructor(found) {
    super(found.message);
    this.code = found.code;
    this.field = found.field ?? null;
    this.retryAfterS = found.retry_after_s ?? null;
  }

  get isAway() {
    return this.code === 'UNAVAILABLE' || this.code === 'PAGE_SERVER_GONE';
  }
}

async function send(path, init) {
  let response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Problem({ code: 'PAGE_SERVER_GONE', message: 'antiphon play has ended: start it again.' });
  }
  if (response.ok) return response;
  const type = response.headers.get('content-type') ?? '';
  const text = await response.text();
  throw new Problem(
    type.includes('json') ? JSON.parse(text).error : { code: `HTTP ${response.status}`, message: text },
  );
}

export async function get(path) {
  return (await send(path, {})).json();
}

function asPost(body, signal) {
  return { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' }, signal };
}

export async function post(path, body, signal) {
  return (await send(path, asPost(body, signal))).json();
}

// Yields one object for each line of the answer. Ends with a Problem if the last line reports one.
export async function* postLines(path, body, signal) {
  const response = await send(path, asPost(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines) yield checked(JSON.parse(line));
    }
  } catch (error) {
    if (error instanceof Problem || error.name === 'AbortError') throw error;
    throw new Problem({ code: 'PAGE_SERVER_GONE', message: 'The connection was lost in the middle of the answer.' });
  } finally {
    reader.cancel().catch(() => {});
  }
}

function checked(event) {
  if (event.type === 'problem') throw new Problem(event.error);
  return event;
}
