// The official `openai` client.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { apiKey, baseURL, counted, greeting, model, narrowKey, pixel, refusedOnce, run } from './run.mjs';

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: 'user', content: 'Hello!' }];
const plain = { model, messages, temperature: 0, max_tokens: 50, chat_template_kwargs: { enable_thinking: false } };

async function refused(status, type, call) {
  await assert.rejects(call, (error) => {
    assert.ok(error instanceof type, `${error.constructor.name}: ${error.message}`);
    assert.equal(error.status, status);
    assert.ok(error.message.length > 10);
    return true;
  });
}

await run({
  async chat() {
    const answer = await client.chat.completions.create(plain);
    assert.equal(answer.object, 'chat.completion');
    assert.equal(answer.choices[0].message.role, 'assistant');
    assert.equal(answer.choices[0].message.content, greeting);
    assert.equal(answer.choices[0].finish_reason, 'stop');
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    assert.ok(answer.usage.completion_tokens > 5);
  },
  async stream() {
    const stream = await client.chat.completions.create({ ...plain, stream: true, stream_options: { include_usage: true } });
    let text = '', finish = null, usage = null, pieces = 0;
    for await (const chunk of stream) {
      assert.equal(chunk.object, 'chat.completion.chunk');
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.delta.content) pieces += 1;
      text += choice.delta.content ?? '';
      finish = choice.finish_reason ?? finish;
    }
    assert.equal(text, greeting);
    assert.equal(finish, 'stop');
    assert.ok(pieces > 3);
    assert.ok(usage.completion_tokens > 5);
  },
  // For a server that gives the prompt back: the calls of the history are the answer's, and grow by a round.
  async tools() {
    const parameters = { type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } };
    const tools = [{ type: 'function', function: { name: 'weather', parameters } }];
    const wanted = { name: 'weather', arguments: '{"city": "Z\u00fcrich", "days": 3}' };
    const first = { id: 'call_1', type: 'function', function: { ...wanted, arguments: '{"city":"Z\u00fcrich","days":3}' } };
    const history = [
      ...messages,
      { role: 'assistant', content: null, tool_calls: [first] },
      { role: 'tool', tool_call_id: 'call_1', content: 'sunny' },
    ];
    const body = { ...plain, tools, max_tokens: 2000 };
    const answer = (await client.chat.completions.create({ ...body, messages: history })).choices[0];
    assert.equal(answer.finish_reason, 'tool_calls');
    assert.deepEqual(answer.message.tool_calls.map((call) => call.function), [wanted]);
    assert.match(answer.message.content, /sunny/);

    const [call] = answer.message.tool_calls;
    history.push({ role: 'assistant', content: null, tool_calls: [call] }, { role: 'tool', tool_call_id: call.id, content: 'rain' });
    const stream = client.chat.completions.stream({ ...body, messages: history });
    const whole = (await stream.finalChatCompletion()).choices[0];
    assert.equal(whole.finish_reason, 'tool_calls');
    assert.deepEqual(whole.message.tool_calls.map((one) => one.function.name), ['weather', 'weather']);
    for (const one of whole.message.tool_calls) assert.equal(one.function.arguments, wanted.arguments);
    assert.equal(new Set(whole.message.tool_calls.map((one) => one.id)).size, 2);

    const none = (await client.chat.completions.create({ ...body, messages: history, tool_choice: 'none' })).choices[0];
    assert.equal(none.finish_reason, 'stop');
    assert.equal(none.message.tool_calls, undefined);
    assert.match(none.message.content, /<tool_call>weather<arg_key>city/);
  },
  async forced() {
    const response = await fetch(new URL('/tokenize', baseURL), {
      method: 'POST', headers: { authorization: `Bearer ${apiKey}`, 'content-type': 'application/json' },
      body: JSON.stringify({ prompt: '</tool_call>', add_special_tokens: false }),
    });
    const { tokens } = await response.json();
    assert.equal(tokens.length, 1);
    const tools = ['get_time', 'ping'].map((name) => ({ type: 'function', function: { name } }));
    // The model has not learnt to end a call.
    const body = { ...plain, tools, logit_bias: { [tokens[0]]: 100 }, parallel_tool_calls: false };
    const named = (await client.chat.completions.create({
      ...body, tool_choice: { type: 'function', function: { name: 'ping' } },
    })).choices[0];
    assert.equal(named.finish_reason, 'stop');
    assert.equal(named.message.content, null);
    assert.deepEqual(named.message.tool_calls.map((call) => call.function), [{ name: 'ping', arguments: '{}' }]);
    const stream = client.chat.completions.stream({ ...body, tool_choice: 'required' });
    const required = (await stream.finalChatCompletion()).choices[0];
    assert.equal(required.finish_reason, 'tool_calls');
    assert.equal(required.message.tool_calls.length, 1);
    assert.ok(['get_time', 'ping'].includes(required.message.tool_calls[0].function.name));
    assert.equal(required.message.tool_calls[0].function.arguments, '{}');
  },
  async abort() {
    const stream = await client.chat.completions.create({
      ...plain, messages: [{ role: 'user', content: 'Count from 1 to 60.' }], max_tokens: 400, stream: true,
    });
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta?.content) break;
    }
    stream.controller.abort();
    const answer = await client.chat.completions.create(plain);
    assert.equal(answer.choices[0].message.content, greeting);
  },
  async models() {
    const list = await client.models.list();
    assert.deepEqual(list.data.map((m) => m.id), [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async completion() {
    const answer = await client.completions.create({ model, prompt: 'Once upon a time', max_tokens: 8, temperature: 0 });
    assert.equal(answer.object, 'text_completion');
    assert.ok(answer.choices[0].text.length > 0);
    assert.equal(answer.choices[0].finish_reason, 'length');
  },
  async 401() {
    const stranger = new OpenAI({ baseURL, apiKey: 'wrong', maxRetries: 0 });
    await refused(401, OpenAI.AuthenticationError, stranger.chat.completions.create(plain));
    await refused(401, OpenAI.AuthenticationError, stranger.models.list());
  },
  async 404() {
    await refused(404, OpenAI.NotFoundError, client.chat.completions.create({ ...plain, model: 'no-such-model' }));
  },
  async 400() {
    await refused(400, OpenAI.BadRequestError, client.chat.completions.create({ ...plain, messages: [] }));
    await refused(400, OpenAI.BadRequestError, client.chat.completions.create({ ...plain, temperature: 'hot' }));
    await refused(400, OpenAI.BadRequestError, client.chat.completions.create({ ...plain, messages: [{ role: 'boss', content: 'x' }] }));
  },
  async responses() {
    const body = {
      model, input: 'Hello!', temperature: 0, max_output_tokens: 50, store: false,
      chat_template_kwargs: { enable_thinking: false },
    };
    const answer = await client.responses.create(body);
    assert.equal(answer.status, 'completed');
    assert.equal(answer.output_text, greeting);
    assert.equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens);
    const stream = client.responses.stream(body);
    const types = [];
    for await (const event of stream) types.push(event.type);
    assert.equal(types[0], 'response.created');
    assert.equal(types.at(-1), 'response.completed');
    assert.equal((await stream.finalResponse()).output.at(-1).content[0].text, greeting);
    await refused(400, OpenAI.BadRequestError, client.responses.create({ ...body, previous_response_id: 'resp_1' }));
  },
  async unsupported() {
    const image = { type: 'image_url', image_url: { url: `data:image/png;base64,${pixel}` } };
    await refused(400, OpenAI.BadRequestError, client.chat.completions.create({ ...plain, messages: [{ role: 'user', content: [image] }] }));
    await refused(501, OpenAI.InternalServerError, client.embeddings.create({ model, input: 'x' }));
    const statuses = [];
    const patient = new OpenAI({ baseURL, apiKey: narrowKey, maxRetries: 5, fetch: counted(statuses) });
    const answer = await refusedOnce(statuses, () => patient.chat.completions.create(plain));
    assert.equal(answer.choices[0].message.content, greeting);
  },
});
