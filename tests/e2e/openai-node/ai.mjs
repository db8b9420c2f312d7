// `ai` with @ai-sdk/openai-compatible.
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, RetryError, generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai';
import { apiKey, baseURL, city, counted, greeting, model, narrowKey, pixel, refusedOnce, run } from './run.mjs';

const provider = (key, fetchWith) => createOpenAICompatible({ name: 'glm53', baseURL, apiKey: key, fetch: fetchWith })(model);
const glm = provider(apiKey);
const off = { glm53: { chat_template_kwargs: { enable_thinking: false } } };
const plain = { model: glm, prompt: 'Hello!', temperature: 0, maxOutputTokens: 50, maxRetries: 0, providerOptions: off };

async function refused(status, call) {
  await assert.rejects(call, (error) => {
    const inner = RetryError.isInstance(error) ? error.lastError : error;
    assert.ok(APICallError.isInstance(inner), String(error));
    assert.equal(inner.statusCode, status);
    return true;
  });
}

await run({
  async chat() {
    const answer = await generateText(plain);
    assert.equal(answer.text, greeting);
    assert.equal(answer.finishReason, 'stop');
    assert.ok(answer.usage.outputTokens > 5);
  },
  async stream() {
    const answer = streamText(plain);
    let text = '', pieces = 0;
    for await (const piece of answer.textStream) {
      text += piece;
      pieces += 1;
    }
    assert.equal(text, greeting);
    assert.ok(pieces > 3);
    assert.equal(await answer.finishReason, 'stop');
  },
  // For a server that gives the prompt back: a call of the history is called again, its result is in the next prompt.
  async tools() {
    const asked = [];
    const weather = tool({
      description: 'Weather', inputSchema: jsonSchema(city), execute: async (input) => { asked.push(input); return 'rain'; },
    });
    const history = [
      { role: 'user', content: 'Hello!' },
      { role: 'assistant', content: ['Z\u00fcrich', 'Oslo'].map((place, i) => (
        { type: 'tool-call', toolCallId: `call_${i}`, toolName: 'weather', input: { city: place, days: 3 } })) },
      { role: 'tool', content: [0, 1].map((i) => (
        { type: 'tool-result', toolCallId: `call_${i}`, toolName: 'weather', output: { type: 'text', value: 'sunny' } })) },
    ];
    const { prompt: _, ...body } = plain;
    const answer = await generateText({ ...body, messages: history, tools: { weather }, maxOutputTokens: 3000, stopWhen: stepCountIs(2) });
    assert.equal(answer.steps.length, 2);
    assert.deepEqual(answer.steps[0].toolCalls.map((call) => call.input.city), ['Z\u00fcrich', 'Oslo']);
    assert.equal(answer.steps[0].finishReason, 'tool-calls');
    assert.match(answer.steps[1].text, /rain/);
    assert.deepEqual(asked[0], { city: 'Z\u00fcrich', days: 3 });
    const streamed = streamText({ ...body, messages: history, tools: { weather }, maxOutputTokens: 3000 });
    assert.deepEqual((await streamed.toolCalls).map((call) => call.input.days), [3, 3]);
  },
  async abort() {
    const control = new AbortController();
    const answer = streamText({ ...plain, prompt: 'Count from 1 to 60.', maxOutputTokens: 400, abortSignal: control.signal });
    const seen = [];
    for await (const part of answer.fullStream) {
      seen.push(part.type);
      if (part.type === 'text-delta') control.abort();
    }
    assert.ok(seen.includes('abort'), seen.join());
    assert.equal((await generateText(plain)).text, greeting);
  },
  async errors() {
    const image = [{ type: 'image', image: `data:image/png;base64,${pixel}` }];
    const { prompt: _, ...body } = plain;
    await refused(400, generateText({ ...body, messages: [{ role: 'user', content: image }] }));
    await refused(401, generateText({ ...plain, model: provider('wrong') }));
  },
  async retry() {
    const statuses = [];
    const patient = provider(narrowKey, counted(statuses));
    const answer = await refusedOnce(statuses, () => generateText({ ...plain, model: patient, maxRetries: 5 }));
    assert.equal(answer.text, greeting);
  },
});
