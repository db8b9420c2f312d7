// @langchain/openai.
import assert from 'node:assert/strict';
import { AIMessage, HumanMessage, ToolMessage } from '@langchain/core/messages';
import { ChatOpenAI } from '@langchain/openai';
import { apiKey, baseURL, city, counted, greeting, model, narrowKey, pixel, refusedOnce, run } from './run.mjs';

const chat = (more = {}, configuration = {}) => new ChatOpenAI({
  model, apiKey, temperature: 0, maxTokens: 50, maxRetries: 0, timeout: 60_000,
  modelKwargs: { chat_template_kwargs: { enable_thinking: false } },
  ...more, configuration: { baseURL, ...configuration },
});
const tools = [{ type: 'function', function: { name: 'weather', description: 'Weather', parameters: city } }];

async function refused(status, call) {
  await assert.rejects(call, (error) => {
    assert.equal(error.status, status, String(error));
    return true;
  });
}

await run({
  async chat() {
    const answer = await chat().invoke('Hello!');
    assert.equal(answer.content, greeting);
    assert.equal(answer.response_metadata.finish_reason, 'stop');
    assert.ok(answer.usage_metadata.output_tokens > 5);
  },
  async stream() {
    let text = '', pieces = 0;
    for await (const chunk of await chat().stream('Hello!')) {
      text += chunk.content;
      pieces += chunk.content ? 1 : 0;
    }
    assert.equal(text, greeting);
    assert.ok(pieces > 3);
  },
  // For a server that gives the prompt back: the calls of the history are the answer's.
  async tools() {
    const bound = chat({ maxTokens: 2000 }).bindTools(tools);
    const history = [
      new HumanMessage('Hello!'),
      new AIMessage({ content: '', tool_calls: ['Z\u00fcrich', 'Oslo'].map((place, i) => (
        { id: `call_${i}`, name: 'weather', args: { city: place, days: 3 }, type: 'tool_call' })) }),
      new ToolMessage({ tool_call_id: 'call_0', content: 'sunny' }),
      new ToolMessage({ tool_call_id: 'call_1', content: 'snow' }),
    ];
    const answer = await bound.invoke(history);
    assert.deepEqual(answer.tool_calls.map((call) => call.args), [{ city: 'Z\u00fcrich', days: 3 }, { city: 'Oslo', days: 3 }]);
    let whole = null;
    for await (const chunk of await bound.stream([...history, answer,
      ...answer.tool_calls.map((call) => new ToolMessage({ tool_call_id: call.id, content: 'rain' }))])) {
      whole = whole ? whole.concat(chunk) : chunk;
    }
    assert.deepEqual(whole.tool_calls.map((call) => call.args.city), ['Z\u00fcrich', 'Oslo', 'Z\u00fcrich', 'Oslo']);
  },
  async abort() {
    const control = new AbortController();
    await assert.rejects(async () => {
      for await (const chunk of await chat({ maxTokens: 400 }).stream('Count from 1 to 60.', { signal: control.signal })) {
        if (chunk.content) control.abort();
      }
    });
    assert.equal((await chat().invoke('Hello!')).content, greeting);
  },
  async errors() {
    const image = new HumanMessage({ content: [{ type: 'image_url', image_url: { url: `data:image/png;base64,${pixel}` } }] });
    await refused(400, chat().invoke([image]));
    await refused(401, chat({ apiKey: 'wrong' }).invoke('Hello!'));
    await refused(404, chat({ model: 'no-such-model' }).invoke('Hello!'));
  },
  async retry() {
    const statuses = [];
    const patient = chat({ apiKey: narrowKey, maxRetries: 5 }, { fetch: counted(statuses) });
    assert.equal((await refusedOnce(statuses, () => patient.invoke('Hello!'))).content, greeting);
  },
});
