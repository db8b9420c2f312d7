// Chromium by its own protocol over a pipe (--remote-debugging-pipe): no packages, no port.
import { spawn } from 'node:child_process';

const patience = 60_000;

export class Page {
  #child;
  #rest = '';
  #next = 1;
  #calls = new Map();
  #session;
  #intercept = null;
  /// Exceptions, console errors and whatever a policy refused: a good page has none.
  complaints = [];

  static async open(folder, url) {
    const page = new Page();
    await page.#start(folder);
    await page.go(url);
    return page;
  }

  async #start(folder) {
    this.#child = spawn('chromium', ['--headless=new', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--disable-extensions',
      '--force-color-profile=srgb', '--font-render-hinting=none', '--no-first-run', `--user-data-dir=${folder}`, '--remote-debugging-pipe', 'about:blank'],
    { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'] });
    this.#child.on('exit', () => {
      for (const { reject } of this.#calls.values()) reject(new Error('the browser ended'));
      this.#calls.clear();
    });
    this.#child.stdio[4].setEncoding('utf8').on('data', (text) => this.#take(text));
    const { targetInfos } = await this.send('Target.getTargets');
    const { targetId } = targetInfos.find((target) => target.type === 'page');
    ({ sessionId: this.#session } = await this.send('Target.attachToTarget', { targetId, flatten: true }));
    for (const domain of ['Page', 'Runtime', 'Log', 'DOM', 'Network']) await this.send(`${domain}.enable`);
  }

  #take(text) {
    const parts = (this.#rest + text).split('\0');
    this.#rest = parts.pop();
    for (const part of parts) this.#message(JSON.parse(part));
  }

  #message({ id, result, error, method, params }) {
    if (id !== undefined) {
      const call = this.#calls.get(id);
      this.#calls.delete(id);
      if (!call) return;
      if (error) call.reject(new Error(`${call.method}: ${error.message}`));
      else call.resolve(result);
    } else if (method === 'Runtime.exceptionThrown') {
      const { exception, text } = params.exceptionDetails;
      this.complaints.push((exception && exception.description) || text);
    } else if (method === 'Log.entryAdded' && params.entry.level === 'error' && params.entry.source !== 'network') {
      this.complaints.push(params.entry.text);
    } else if (method === 'Page.javascriptDialogOpening') {
      this.complaints.push(`a dialog opened: ${params.message}`);
      this.send('Page.handleJavaScriptDialog', { accept: false });
    } else if (method === 'Fetch.requestPaused') {
      this.#answer(params);
    }
  }

  async #answer({ requestId, request }) {
    const { status = 200, headers = {}, body } = this.#intercept(request);
    await this.send('Fetch.fulfillRequest', {
      requestId, responseCode: status, body: Buffer.from(body).toString('base64'),
      responseHeaders: Object.entries(headers).map(([name, value]) => ({ name, value: String(value) })),
    });
  }

  send(method, params = {}) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#calls.set(id, { resolve, reject, method });
      this.#child.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId: this.#session })}\0`);
    });
  }

  /// Answers requests whose URL matches instead of the server: `answer(request)` is {status, headers, body}.
  async intercept(urlPattern, answer) {
    this.#intercept = answer;
    await this.send('Fetch.enable', { patterns: [{ urlPattern }] });
  }

  async go(url) {
    await this.send('Page.navigate', { url });
    await this.until('document.readyState === "complete"');
  }

  /// The value of an expression in the page.
  async value(expression) {
    const { result, exceptionDetails } = await this.send('Runtime.evaluate', { expression, returnByValue: true, awaitPromise: true });
    if (exceptionDetails) throw new Error(`${expression}: ${exceptionDetails.exception?.description ?? exceptionDetails.text}`);
    return result.value;
  }

  /// Waits until an expression is true.
  async until(expression) {
    for (const end = Date.now() + patience; Date.now() < end;) {
      if (await this.value(expression).catch(() => false)) return;
      await new Promise((done) => setTimeout(done, 50));
    }
    throw new Error(`never true: ${expression}\nThe page says: ${await this.value('document.body.innerText')}`);
  }

  /// Puts text where the focus is, as typing does.
  type(text) {
    return this.send('Input.insertText', { text });
  }

  async press(key, modifiers = 0) {
    const codes = { Enter: 13, Escape: 27, Tab: 9 };
    const event = { key, code: key, modifiers, windowsVirtualKeyCode: codes[key], ...(key === 'Enter' ? { text: '\r' } : {}) };
    await this.send('Input.dispatchKeyEvent', { ...event, type: 'keyDown' });
    await this.send('Input.dispatchKeyEvent', { ...event, type: 'keyUp', text: undefined });
  }

  /// Clicks the last visible button with that text or label.
  async click(text) {
    const found = `[...document.querySelectorAll('button')].findLast(b => b.offsetParent && (b.textContent.trim() === ${JSON.stringify(text)} || b.getAttribute('aria-label') === ${JSON.stringify(text)}))`;
    await this.until(`Boolean(${found})`);
    await this.value(`${found}.click()`);
  }

  async setFiles(selector, files) {
    const { root } = await this.send('DOM.getDocument');
    const { nodeId } = await this.send('DOM.querySelector', { nodeId: root.nodeId, selector });
    await this.send('DOM.setFileInputFiles', { nodeId, files });
  }

  async look(width, height, scheme) {
    await this.send('Emulation.setDeviceMetricsOverride', { width, height, deviceScaleFactor: 1, mobile: false });
    await this.send('Emulation.setEmulatedMedia', { features: [{ name: 'prefers-color-scheme', value: scheme }, { name: 'prefers-reduced-motion', value: 'reduce' }] });
  }

  /// A PNG of the window.
  async picture() {
    const { data } = await this.send('Page.captureScreenshot', { format: 'png' });
    return Buffer.from(data, 'base64');
  }

  async close() {
    const ended = new Promise((done) => this.#child.once('exit', done));
    this.send('Browser.close').catch(() => {});
    const timer = setTimeout(() => this.#child.kill('SIGKILL'), 10_000);
    await ended;
    clearTimeout(timer);
  }
}
