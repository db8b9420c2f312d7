// @anthropic-ai/sdk.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import { apiKey, baseURL, city, counted, greeting, model, narrowKey, pixel, refusedOnce, run } from './run.mjs';

const root = baseURL.replace(/\/v1$/, '');
const client = new Anthropic({ baseURL: root, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: 'user', content: 'Hello!' }];
const plain = { model, messages, temperature: 0, max_tokens: 50, thinking: { type: 'disabled' } };
const tools = [{ name: 'weather', description: 'Weather', input_schema: city }];
const use = (id, place) => ({ type: 'tool_use', id, name: 'weather', input: { city: place, days: 3 } });
const result = (id, content) => ({ type: 'tool_result', tool_use_id: id, content });

async function refused(status, type, call) {
  await assert.rejects(call, (error) => {
    assert.ok(error instanceof type, `${error.constructor.name}: ${error.message}`);
    assert.equal(error.status, status);
    assert.equal(error.error.type, 'error');
    return true;
  });
}

await run({
  async chat() {
    const answer = await client.messages.create(plain);
    assert.equal(answer.type, 'message');
    assert.deepEqual(answer.content, [{ type: 'text', text: greeting }]);
    assert.equal(answer.stop_reason, 'end_turn');
    assert.ok(answer.usage.output_tokens > 5);
    const { max_tokens: _, temperature: __, ...counting } = plain;
    const count = await client.messages.countTokens(counting);
    assert.equal(count.input_tokens, answer.usage.input_tokens + answer.usage.cache_read_input_tokens);
  },
  async stream() {
    const stream = client.messages.stream(plain);
    let text = '', pieces = 0;
    stream.on('text', (piece) => { text += piece; pieces += 1; });
    const whole = await stream.finalMessage();
    assert.equal(text, greeting);
    assert.ok(pieces > 3);
    assert.deepEqual(whole.content, [{ type: 'text', text: greeting }]);
    assert.equal(whole.stop_reason, 'end_turn');
  },
  // For a server that gives the prompt back: the calls of the history are the answer's.
  async tools() {
    const history = [
      ...messages,
      { role: 'assistant', content: [use('toolu_1', 'Z\u00fcrich')] },
      { role: 'user', content: [result('toolu_1', 'sunny')] },
    ];
    const body = { ...plain, tools, max_tokens: 2000 };
    const answer = await client.messages.create({ ...body, messages: history });
    assert.equal(answer.stop_reason, 'tool_use');
    const [called] = answer.content.filter((block) => block.type === 'tool_use');
    assert.equal(called.name, 'weather');
    assert.deepEqual(called.input, { city: 'Z\u00fcrich', days: 3 });

    history.push({ role: 'assistant', content: [called, use('toolu_2', 'Oslo')] },
                 { role: 'user', content: [result('toolu_2', 'snow'), result(called.id, 'rain')] });
    const whole = await client.messages.stream({ ...body, messages: history }).finalMessage();
    assert.equal(whole.stop_reason, 'tool_use');
    const calls = whole.content.filter((block) => block.type === 'tool_use');
    assert.deepEqual(calls.map((call) => call.input.city), ['Z\u00fcrich', 'Z\u00fcrich', 'Oslo']);
    assert.equal(new Set(calls.map((call) => call.id)).size, 3);

    const none = await client.messages.create({ ...body, messages: history, tool_choice: { type: 'none' } });
    assert.equal(none.stop_reason, 'end_turn');
    assert.ok(none.content.every((block) => block.type === 'text'));
  },
  async abort() {
    const stream = client.messages.stream({ ...plain, messages: [{ role: 'user', content: 'Count from 1 to 60.' }], max_tokens: 400 });
    await new Promise((done) => { stream.once('text', done); });
    stream.abort();
    await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
    assert.deepEqual((await client.messages.create(plain)).content, [{ type: 'text', text: greeting }]);
  },
  async errors() {
    const image = { type: 'image', source: { type: 'base64', media_type: 'image/png', data: pixel } };
    await refused(400, Anthropic.BadRequestError, client.messages.create({ ...plain, messages: [{ role: 'user', content: [image] }] }));
    await refused(400, Anthropic.BadRequestError, client.messages.create({ ...plain, messages: [] }));
    await refused(404, Anthropic.NotFoundError, client.messages.create({ ...plain, model: 'no-such-model' }));
    const stranger = new Anthropic({ baseURL: root, apiKey: 'wrong', maxRetries: 0 });
    await refused(401, Anthropic.AuthenticationError, stranger.messages.create(plain));
  },
  async retry() {
    const statuses = [];
    const patient = new Anthropic({ baseURL: root, apiKey: narrowKey, maxRetries: 5, fetch: counted(statuses) });
    const answer = await refusedOnce(statuses, () => patient.messages.create(plain));
    assert.deepEqual(answer.content, [{ type: 'text', text: greeting }]);
  },
});
