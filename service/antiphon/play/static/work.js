// One piece of work of a view at a time: a new one cancels the one before.

import { Problem } from './api.js';
import { update } from './state.js';

// Event of the window: a request found no server.
export const SERVER_GONE = 'servergone';

export class Work {
  // status: empty, running, done, cancelled, failed
  constructor() {
    this.status = 'empty';
    this.problem = null;
    this.retryAt = null;
    this.controller = null;
    this.timer = null;
  }

  // Runs work(signal). A refusal with advice runs it again after that time.
  async run(work) {
    this.#stop();
    const controller = (this.controller = new AbortController());
    this.status = 'running';
    this.problem = null;
    update();
    try {
      await work(controller.signal);
      if (this.controller === controller) this.status = 'done';
    } catch (error) {
      if (this.controller !== controller || error.name === 'AbortError') return;
      if (!(error instanceof Problem)) throw error;
      this.status = 'failed';
      this.problem = error;
      if (error.isAway) dispatchEvent(new Event(SERVER_GONE));
      if (error.retryAfterS !== null) this.#retry(work, error.retryAfterS);
    } finally {
      update();
    }
  }

  cancel() {
    if (this.status === 'running') this.status = 'cancelled';
    this.#stop();
    update();
  }

  reset() {
    this.#stop();
    this.status = 'empty';
    this.problem = null;
    update();
  }

  // Seconds until the next try; null if there is none.
  get retryInS() {
    return this.retryAt === null ? null : Math.max(0, Math.ceil((this.retryAt - performance.now()) / 1000));
  }

  #retry(work, seconds) {
    this.retryAt = performance.now() + seconds * 1000;
    this.timer = setInterval(() => {
      if (performance.now() >= this.retryAt) this.run(work);
      else update();
    }, 250);
  }

  #stop() {
    this.controller?.abort();
    this.controller = null;
    this.retryAt = null;
    clearInterval(this.timer);
  }
}
