// What the checks of all clients share. node CLIENT.mjs NAME BASE_URL KEY NARROW_KEY: one check; exit 0 when it held.
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const [name, baseURL, apiKey, narrowKey] = process.argv.slice(2);
export { apiKey, baseURL, narrowKey };
export const model = 'glm53-tiny';
export const greeting = 'Hello! How can I help you today?';
export const city = { type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } };
/// One transparent pixel.
export const pixel = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==';

/// fetch() that notes the status of every answer.
export function counted(statuses) {
  return async (...request) => {
    const answer = await fetch(...request);
    statuses.push(answer.status);
    return answer;
  };
}

/// Calls `ask` while the narrow key's one place is taken, and frees the place when the first refusal has come: whoever
/// tries again gets an answer.
export async function refusedOnce(statuses, ask) {
  const client = new OpenAI({ baseURL, apiKey: narrowKey, maxRetries: 0 });
  const stream = await client.chat.completions.create({
    model, messages: [{ role: 'user', content: 'Count.' }], stream: true, ignore_eos: true, max_tokens: 3000,
  });
  const chunks = stream[Symbol.asyncIterator]();
  await chunks.next();
  const answer = ask();
  answer.catch(() => {});
  for (let tries = 0; tries < 600 && !statuses.includes(429); tries += 1) {
    await new Promise((done) => { setTimeout(done, 10); });
  }
  stream.controller.abort();
  const got = await answer;
  assert.equal(statuses[0], 429);
  assert.equal(statuses.at(-1), 200);
  return got;
}

export async function run(checks) {
  assert.ok(checks[name], `no check is called ${name}`);
  await checks[name]();
}
