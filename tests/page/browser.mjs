// node browser.mjs NAME URL KEY FOLDER: one check of the chat page in headless Chromium; exit 0 when it held. The server at URL has glm53-tiny
// behind it, which calls no tools and writes nothing hostile: answers of that kind are put in its place. FOLDER is for the browser's own files.
import assert from 'node:assert/strict';
import { readFileSync, writeFileSync } from 'node:fs';
import { Page } from './cdp.mjs';
import { difference } from './picture.mjs';
import { answer, question, still } from './scene.mjs';

const [name, url, key, folder] = process.argv.slice(2);
const greeting = 'Hello! How can I help you today?';
const completions = '*/v1/chat/completions';
const page = await Page.open(`${folder}/browser-${name}`, url);

const text = (selector) => page.value(`document.querySelector(${JSON.stringify(selector)})?.innerText ?? ''`);
const last = 'document.querySelector("#talk > li:last-child")';
const answered = `${last}?.matches('.answer:not(.busy)')`;

async function enterKey(value) {
  await page.until('!document.querySelector("#login").hidden');
  await page.value('document.querySelector("#key").focus()');
  await page.type(value);
  await page.press('Enter');
}

async function logIn() {
  await enterKey(key);
  await page.until('document.querySelector("#login").hidden && document.querySelector("#model").textContent === "glm53-tiny"');
}

async function set(values) {
  await page.click('Settings');
  for (const [field, value] of Object.entries(values)) {
    await page.value(`(() => { const f = document.querySelector('#values').elements[${JSON.stringify(field)}], v = ${JSON.stringify(value)};
      if (typeof v === 'boolean') f.checked = v; else f.value = v;
      f.dispatchEvent(new Event('change', {bubbles: true})); })()`);
  }
  await page.click('Close settings');
}

async function send(message) {
  await page.value('document.querySelector("#text").focus()');
  await page.type(message);
  await page.press('Enter');
}

const stream = (...deltas) => ({
  headers: { 'Content-Type': 'text/event-stream; charset=utf-8' },
  body: deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] })}\n\n`).join('') +
    'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
});

const exact = { thinking: false, temperature: '0' };

const checks = {
  async chat() {
    await enterKey('wrong');
    await page.until('document.querySelector("#denied").textContent === "Unauthorized"');
    assert.equal(await page.value('document.activeElement.id'), 'key');
    await logIn();
    assert.deepEqual(await page.value('[sessionStorage.getItem("key"), localStorage.getItem("key")]'), [JSON.stringify(key), null]);
    await set({ ...exact, max_tokens: '50' });
    await send('Hello!');
    await page.until(`${answered} && ${last}.querySelector('.text').innerText === ${JSON.stringify(greeting)}`);
    assert.match(await text('#talk > li:last-child .figures'), /^\d+ in.* · \d+ out · [\d.]+ tokens\/s$/);
    assert.equal(await text('#talk > li.user .bubble'), 'Hello!');
    assert.equal(await page.value('document.activeElement.id'), 'text');
    assert.match(await page.value('document.querySelector("#said").textContent'), /^Answer: Hello!/);

    await page.click('Regenerate');
    await page.until(`document.querySelectorAll('#talk > li').length === 2 && ${answered} && ${last}.innerText.includes(${JSON.stringify(greeting)})`);
    await page.click('Edit');
    assert.equal(await page.value('document.querySelector("#text").value'), 'Hello!');
    await page.press('Escape');
    assert.equal(await page.value('document.querySelector("#text").value'), '');
    await page.click('Edit');
    await page.value('document.querySelector("#text").select()');
    await send('Count from 1 to 5.');
    await page.until(`${answered} && ${last}.innerText.includes('1, 2, 3, 4, 5')`);
    assert.equal(await page.value('document.querySelectorAll("#talk > li").length'), 2);

    await page.go(url);  // the tab keeps the conversation, the device the settings
    await page.until(`${last}?.innerText.includes('1, 2, 3, 4, 5') && document.querySelector('#model').textContent === 'glm53-tiny'`);
    assert.deepEqual(await page.value('[document.querySelector("#values").elements.temperature.value, document.querySelector("#values").elements.thinking.checked]'), ['0', false]);
    await page.click('New chat');
    assert.equal(await page.value('document.querySelectorAll("#talk > li").length'), 0);
    assert.equal(await page.value('document.querySelector("#empty").hidden'), false);
  },

  async thinking() {
    await logIn();
    await set({ temperature: '0', max_tokens: '300' });
    await send('Hello!');
    await page.until(`${answered} && ${last}.querySelector('.thought').textContent !== ''`);
    assert.equal(await page.value(`${last}.querySelector('details').hidden`), false);
    assert.equal(await page.value(`${last}.querySelector('details').open`), false);
    await page.value(`${last}.querySelector('summary').click()`);
    assert.equal(await page.value(`${last}.querySelector('details').open`), true);
  },

  async stop() {
    await logIn();
    await set({ ...exact, max_tokens: '400' });
    await send('Count from 1 to 60.');
    await page.until(`${last}.matches('.answer.busy') && ${last}.querySelector('.text').innerText.length > 5`);
    assert.deepEqual(await page.value('[document.querySelector("#send").hidden, document.querySelector("#stop").hidden]'), [true, false]);
    await page.press('Escape');
    await page.until(`${answered} && ${last}.querySelector('.note').textContent === 'You stopped this answer.'`);
    assert.match(await text('#talk > li:last-child .text'), /^1, 2/);
    await send('Go on.');
    await page.until(`${last}.matches('.answer.busy') && ${last}.querySelector('.text').innerText.length > 0 || ${answered}`);
    await page.value('document.querySelector("#stop").hidden || document.querySelector("#stop").click()');
    await page.until(answered);
    await page.click('New chat');
    await send('Hello!');
    await page.until(`${answered} && ${last}.innerText.includes(${JSON.stringify(greeting)})`);
  },

  async tools() {
    await logIn();
    const parameters = { type: 'object', properties: { city: { type: 'string' } } };
    await set({ ...exact, tools: JSON.stringify([{ type: 'function', function: { name: 'weather', parameters } }]) });
    const sent = [];
    await page.intercept(completions, (request) => {
      sent.push(JSON.parse(request.postData));
      const call = (id, index) => ({ tool_calls: [{ index, id, type: 'function', function: { name: 'weather', arguments: '{"city":' } }] });
      const rest = (index) => ({ tool_calls: [{ index, function: { arguments: '"Bern"}' } }] });
      const { role, content } = sent.at(-1).messages.at(-1);
      return role === 'tool' ? stream({ content }, call('c2', 0), rest(0), call('c3', 1), rest(1)) : stream(call('c1', 0), rest(0));
    });
    await send('How is the weather in Bern?');
    await page.until(`${answered} && ${last}.querySelectorAll('.call textarea').length === 1`);
    assert.equal(await text('.call h4 code'), 'weather');
    assert.equal(await text('.call pre'), '{\n  "city": "Bern"\n}');
    await page.value('document.querySelector(".call textarea").focus()');
    await page.type('hail and 3 degrees');
    await page.press('Enter', 2);  // with Ctrl
    await page.until(`document.querySelectorAll('.answer').length === 2 && ${answered} && ${last}.querySelectorAll('.call textarea').length === 2`);
    assert.match(await text('#talk > li:last-child .text'), /hail and 3 degrees/);
    assert.equal(await page.value('document.querySelectorAll("#talk > li")[1].querySelectorAll("textarea").length'), 0);
    assert.match(await page.value('document.querySelectorAll("#talk > li")[1].innerText'), /Result\s+hail and 3 degrees/);

    assert.equal(sent[0].tools[0].function.name, 'weather');
    assert.deepEqual(sent[1].messages.slice(1), [
      { role: 'assistant', content: '', tool_calls: [{ id: 'c1', type: 'function', function: { name: 'weather', arguments: '{"city":"Bern"}' } }] },
      { role: 'tool', tool_call_id: 'c1', content: 'hail and 3 degrees' },
    ]);

    await set({ tools: '{' });
    assert.match(await page.value('document.querySelector("#wrong").textContent'), /the tools are no JSON/);
    await page.click('New chat');
    await send('Hello!');
    await page.until(`${last}.querySelector('.error')?.innerText.includes('the tools are no JSON')`);
  },

  async hostile() {
    await logIn();
    await set(exact);
    const hostile = ['<img src=x onerror=alert(1)>', '<script>alert(2)</script>', '**<svg onload=alert(3)>**', '- <iframe srcdoc="<script>alert(4)</script>">',
      '[click](javascript:alert(5))', '![x](https://example.org/x.png)', '```"><img src=x onerror=alert(6)>\n</code></pre><script>alert(7)</script>\n```',
      '<style>*{display:none}</style>', '<a href="javascript:alert(8)">x</a>'];
    await page.intercept(completions, () => stream(...hostile.join('\n\n').match(/[^]{1,7}/g).map((content) => ({ content })),
      { tool_calls: [{ index: 0, id: 'c', function: { name: hostile[0], arguments: hostile[1] } }] }));
    await send(hostile.join('\n\n'));
    await page.until(`${answered} && ${last}.innerText.includes('alert(8)') && ${last}.querySelector('.call')`);
    const tags = await page.value(`[...new Set([...document.querySelectorAll('#talk *')].map((e) => e.localName))]`);
    for (const tag of ['img', 'script', 'svg', 'iframe', 'style', 'a']) assert.ok(!tags.includes(tag), tag);
    for (const shown of ['<img src=x onerror=alert(1)>', '<script>alert(2)</script>', '[click](javascript:alert(5))', '<style>*{display:none}</style>']) {
      assert.ok((await text('#talk > li:last-child')).includes(shown), shown);
    }
    assert.equal(await page.value('document.scripts.length'), 1);
    // Even if the page tried, its own policy would not let it.
    await assert.rejects(page.value('document.body.innerHTML = "<b>x</b>"'), /TrustedHTML/);
    page.complaints.length = 0;
  },

  async image() {
    await logIn();
    await set(exact);
    writeFileSync(`${folder}/dot.png`, Buffer.from('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==', 'base64'));
    await page.setFiles('#files', [`${folder}/dot.png`]);
    await page.until('document.querySelectorAll("#images img").length === 1');
    await send('What is this?');
    await page.until(`${last}.querySelector('.error')`);
    assert.equal(await page.value('document.querySelectorAll("#talk .bubble img").length'), 1);
    const refusal = await text('.error p');
    assert.match(refusal, /image/i);
    await page.click('Edit the message');
    await page.click('Remove image 1');
    await page.value('document.querySelector("#text").select()');
    await send('Hello!');
    await page.until(`${answered} && ${last}.innerText.includes(${JSON.stringify(greeting)})`);
  },

  async retry() {
    await logIn();
    let asked = 0;
    await page.intercept(completions, (request) => {
      asked += 1;
      return asked > 1 ? answer(request) : { status: 503, headers: { 'Content-Type': 'application/json', 'Retry-After': 2 },
        body: '{"error":{"message":"The model is loading.","code":503}}' };
    });
    await send(question);
    await page.until(`${last}.innerText.includes('The model is loading. Trying again in')`);
    await page.until(`${answered} && ${last}.querySelectorAll('.call').length === 2`);
    assert.equal(asked, 2);
  },

  async keyboard() {
    await logIn();
    const seen = [];
    await page.value('document.querySelector(".skip").focus()');
    for (let i = 0; i < 6; i++) {
      await page.press('Tab');
      seen.push(await page.value('document.activeElement.id'));
    }
    assert.deepEqual(seen, ['new', 'options', 'theme', 'text', 'attach', 'send']);
    const named = 'e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim()';
    assert.deepEqual(await page.value(`[...document.querySelectorAll('button, input:not([hidden]), textarea, select')].filter((e) => !(${named})).map((e) => e.outerHTML)`), []);
    await page.click('Settings');
    assert.equal(await page.value('document.activeElement.id'), 'close');
    await page.press('Escape');
    assert.deepEqual(await page.value('[document.querySelector("#settings").hidden, document.activeElement.id]'), [true, 'options']);
    await page.value('document.querySelector("#text").focus()');
    await page.type('one');
    await page.press('Enter', 8);  // with Shift
    await page.type('two');
    assert.equal(await page.value('document.querySelector("#text").value'), 'one\ntwo');
    await page.look(900, 700, 'light');
    const dark = () => page.value('getComputedStyle(document.body).backgroundColor === "rgb(15, 20, 27)"');
    assert.equal(await dark(), false);
    await page.click('Switch between light and dark');
    assert.equal(await dark(), true);
    await page.go(url);
    assert.equal(await dark(), true);
  },

  async pictures() {
    await page.look(1100, 900, 'light');
    await logIn();
    await page.intercept(completions, answer);
    await send(question);
    await page.until("document.querySelectorAll('.call textarea').length === 2");
    await page.value(`['Rain from noon, 14 °C', 'Sunny, 19 °C'].forEach((t, i) => { document.querySelectorAll('.call textarea')[i].value = t; })`);
    await page.click('Send the results');
    await page.until(`${answered} && ${last}.innerText.includes('no link')`);
    await page.value(still);
    for (const [picture, width, height, scheme, settings] of [['light', 1100, 1250, 'light', false], ['dark', 1100, 900, 'dark', true], ['narrow', 400, 1250, 'light', false]]) {
      await page.look(width, height, scheme);
      if (settings) await page.click('Settings');
      await page.value('document.activeElement.blur(); document.querySelector("#scroll").scrollTop = 0');
      assert.equal(await page.value('document.documentElement.scrollWidth'), width, 'nothing sticks out');
      const png = await page.picture(), kept = new URL(`pictures/${picture}.png`, import.meta.url);
      if (settings) await page.click('Close settings');
      if (process.env.GLM53_SCREENSHOTS) writeFileSync(`${process.env.GLM53_SCREENSHOTS}/chat-${picture}.png`, png);
      if (process.env.GLM53_UPDATE) writeFileSync(kept, png);
      const share = difference(png, readFileSync(kept));
      assert.ok(share < 0.1, `${picture}: ${(share * 100).toFixed(1)} % of the picture is not as tests/page/pictures has it; GLM53_UPDATE=1 keeps the new one`);
    }
  },
};

try {
  assert.ok(checks[name], `no check is called ${name}`);
  await checks[name]();
  assert.deepEqual(page.complaints, []);
} finally {
  await page.close();
}
