import assert from 'node:assert/strict';
import test from 'node:test';
import {
  EventStream, addChunk, figures, isWhole, newAnswer, refusal, requestBody, retryDelay, shownArguments, wireMessages,
} from '../../engine/api/page/stream.mjs';

function events(pieces) {
  const seen = [];
  const stream = new EventStream((data, name) => seen.push([name, data]));
  for (const piece of pieces) stream.feed(piece);
  return seen;
}

test('events are the same however the text is cut', () => {
  const text = '\uFEFF: a comment\n\ndata: {"a":1}\n\nevent: note\r\ndata: one\r\ndata: two\r\n\r\ndata:x\rdata\r\rid: 7\nretry: 5\n\ndata:  [DONE]\n\n';
  const wanted = [['message', '{"a":1}'], ['note', 'one\ntwo'], ['message', 'x\n'], ['message', ' [DONE]']];
  assert.deepEqual(events([text]), wanted);
  assert.deepEqual(events([...text]), wanted);
  for (let i = 1; i < text.length; i++) {
    assert.deepEqual(events([text.slice(0, i), text.slice(i)]), wanted, String(i));
    assert.deepEqual(events([text.slice(0, i), '', text.slice(i, i + 1), text.slice(i + 1)]), wanted, String(i));
  }
  assert.deepEqual(events(['data: never ended\n']), []);
});

function answerOf(...chunks) {
  const answer = newAnswer();
  for (const chunk of chunks) addChunk(answer, chunk);
  return answer;
}
const delta = (members, finish = null) => ({ choices: [{ index: 0, delta: members, finish_reason: finish }] });

test('chunks add up to reasoning, content, calls, finish and usage', () => {
  const answer = answerOf(
    delta({ role: 'assistant', content: '' }),
    delta({ reasoning_content: 'Hm', reasoning: 'Hm' }), delta({ reasoning: '.' }),
    delta({ content: 'So' }),
    delta({ tool_calls: [{ index: 0, id: 'c1', type: 'function', function: { name: 'weather', arguments: '' } }] }),
    delta({ tool_calls: [{ index: 0, function: { arguments: '{"city":' } }] }),
    delta({ tool_calls: [{ index: 1, id: 'c2', function: { name: 'ping', arguments: '{}' } }] }),
    delta({ tool_calls: [{ index: 0, function: { arguments: '"Bern"}' } }] }),
    delta({}, 'tool_calls'), { choices: [], usage: { prompt_tokens: 3, completion_tokens: 9 } });
  assert.equal(answer.reasoning, 'Hm.');
  assert.equal(answer.content, 'So');
  assert.deepEqual(answer.calls, [{ id: 'c1', name: 'weather', arguments: '{"city":"Bern"}' }, { id: 'c2', name: 'ping', arguments: '{}' }]);
  assert.equal(answer.finish, 'tool_calls');
  assert.equal(answer.usage.completion_tokens, 9);
  assert.equal(shownArguments(answer.calls[0]), '{\n  "city": "Bern"\n}');
});

test('an error within a stream keeps its words and what came before it; rubbish does no harm', () => {
  const answer = answerOf(delta({ content: 'Half' }), { error: { message: 'rank lost', code: 500 } });
  assert.equal(answer.content, 'Half');
  assert.equal(answer.error, 'rank lost');
  assert.deepEqual(answerOf(null, 7, 'x', {}, { choices: [] }, { choices: [{}] }, delta({ tool_calls: [{}] })).calls, [{ id: '', name: '', arguments: '' }]);
  assert.equal(answerOf(delta({ tool_calls: [{ index: 1e9, id: 'x' }] })).calls.length, 1);
});

test('only whole calls with a result go back to the server', () => {
  assert.ok(!isWhole({ id: 'a', name: 'f', arguments: '{"city": "Be' }));
  assert.ok(!isWhole({ id: 'a', name: 'f', arguments: '[]' }));
  const calls = [{ id: 'a', name: 'f', arguments: '{}' }, { id: 'b', name: 'g', arguments: '{}' }, { id: 'c', name: 'h', arguments: '{"x' }];
  const messages = [
    { role: 'user', text: 'Go' },
    { ...newAnswer(), reasoning: 'R', calls },
    { role: 'tool', id: 'a', text: '42' },
    { ...newAnswer(), content: 'Done' },
    newAnswer(),
    { role: 'user', text: 'See', images: ['data:image/png;base64,AA'] },
  ];
  assert.deepEqual(wireMessages(messages, 'Be short'), [
    { role: 'system', content: 'Be short' },
    { role: 'user', content: 'Go' },
    { role: 'assistant', content: '', reasoning_content: 'R', tool_calls: [{ id: 'a', type: 'function', function: { name: 'f', arguments: '{}' } }] },
    { role: 'tool', tool_call_id: 'a', content: '42' },
    { role: 'assistant', content: 'Done' },
    { role: 'user', content: [{ type: 'image_url', image_url: { url: 'data:image/png;base64,AA' } }, { type: 'text', text: 'See' }] },
  ]);
});

test('settings become members; what is empty is the server\'s to choose; what is wrong is named', () => {
  const wire = (settings) => JSON.parse(JSON.stringify(requestBody(settings, 'm', [{ role: 'user', text: 'Hi' }])));
  const plain = { model: 'm', messages: [{ role: 'user', content: 'Hi' }], stream: true, stream_options: { include_usage: true } };
  assert.deepEqual(wire({}), plain);
  assert.deepEqual(wire({ temperature: ' ', seed: '', tools: ' ', thinking: true, effort: '' }), plain);
  assert.deepEqual(wire({ temperature: '0', top_p: 0.9, max_tokens: '50', seed: '7', effort: 'low', system: ' S ', tools: '[{"type":"function"}]' }), {
    ...plain, messages: [{ role: 'system', content: 'S' }, ...plain.messages], temperature: 0, top_p: 0.9, max_tokens: 50, seed: 7,
    reasoning_effort: 'low', tools: [{ type: 'function' }],
  });
  assert.deepEqual(wire({ thinking: false, effort: 'high' }), { ...plain, thinking: { type: 'disabled' } });
  assert.throws(() => wire({ temperature: 'hot' }), /temperature is "hot"/);
  assert.throws(() => wire({ max_tokens: '1.5' }), /max_tokens is "1.5", not a whole number/);
  assert.throws(() => wire({ tools: '{' }), /tools are no JSON/);
  assert.throws(() => wire({ tools: '{}' }), /must be a JSON array/);
});

test('refusals are told in the server\'s words', () => {
  assert.equal(refusal(400, '{"error":{"message":"images: not supported","code":400}}'), 'images: not supported');
  assert.equal(refusal(502, '<html>Bad gateway'), 'the server answered with HTTP status 502');
  assert.equal(refusal(500, 'null'), 'the server answered with HTTP status 500');
});

test('Retry-After: seconds, a date, nothing, nonsense', () => {
  const now = Date.parse('2026-01-01T00:00:00Z');
  assert.equal(retryDelay(429, '7', now), 7);
  assert.equal(retryDelay(503, 'Thu, 01 Jan 2026 00:00:09 GMT', now), 9);
  assert.equal(retryDelay(503, 'Thu, 01 Jan 2025 00:00:09 GMT', now), 1);
  assert.equal(retryDelay(429, null, now), 1);
  assert.equal(retryDelay(503, 'soon', now), 5);
  assert.equal(retryDelay(503, '99999', now), 600);
});

test('figures of an answer', () => {
  assert.equal(figures(null, 0, 1), '');
  assert.equal(figures({ prompt_tokens: 41, completion_tokens: 101, prompt_tokens_details: { cached_tokens: 32 } }, 1000, 5000),
    '41 in (32 cached) · 101 out · 25.0 tokens/s');
  assert.equal(figures({ prompt_tokens: 4, completion_tokens: 1 }, 5, 5), '4 in · 1 out');
});
