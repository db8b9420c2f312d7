// What of the chat needs no document: server-sent events, the answer they add up to, requests, errors. Tests: tests/page.

/// Server-sent events out of text in pieces of any size (HTML standard, "Interpreting an event stream").
export class EventStream {
  constructor(onEvent) {
    Object.assign(this, {onEvent, rest: '', data: [], name: '', begun: false, afterCr: false});
  }
  feed(text) {
    if (!text) return;
    if (!this.begun && text[0] === '\uFEFF') text = text.slice(1);
    this.begun = true;
    if (this.afterCr && text[0] === '\n') text = text.slice(1);
    this.afterCr = text.endsWith('\r');
    const lines = (this.rest + text).split(/\r\n|\r|\n/);
    this.rest = lines.pop();
    for (const line of lines) this.line(line);
  }
  line(line) {
    if (line === '') {
      if (this.data.length) this.onEvent(this.data.join('\n'), this.name || 'message');
      this.data = [];
      this.name = '';
      return;
    }
    const colon = line.indexOf(':');  // at 0: a comment
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(line[colon + 1] === ' ' ? colon + 2 : colon + 1);
    if (field === 'data') this.data.push(value);
    if (field === 'event') this.name = value;
  }
}

export function newAnswer() {
  return {role: 'assistant', reasoning: '', content: '', calls: [], finish: '', usage: null, error: '', stopped: false};
}

/// Adds one chunk of a chat completion stream to an answer; whether it brought anything to show.
export function addChunk(answer, chunk) {
  if (!chunk || typeof chunk !== 'object') return false;
  if (chunk.error) {
    answer.error = messageOf(chunk) || 'the server ended the stream with an error';
    return true;
  }
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices && chunk.choices[0];
  if (!choice) return false;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  const delta = choice.delta || {};
  const reasoning = delta.reasoning_content || delta.reasoning || '', content = delta.content || '';
  answer.reasoning += reasoning;
  answer.content += content;
  for (const piece of delta.tool_calls || []) {
    const at = Number.isInteger(piece.index) && piece.index >= 0 && piece.index < 128 ? piece.index : answer.calls.length;
    while (answer.calls.length <= at) answer.calls.push({id: '', name: '', arguments: ''});
    const call = answer.calls[at], made = piece.function || {};
    if (piece.id) call.id = piece.id;
    call.name += made.name || '';
    call.arguments += made.arguments || '';
  }
  return Boolean(reasoning || content || (delta.tool_calls || []).length);
}

/// A call that a limit or the user cut has no JSON object as its arguments; it cannot be answered.
export function isWhole(call) {
  try {
    const value = JSON.parse(call.arguments);
    return Boolean(call.id && call.name) && typeof value === 'object' && value !== null && !Array.isArray(value);
  } catch (e) {
    return false;
  }
}

/// Arguments as they are read best: indented once they are whole.
export function shownArguments(call) {
  return isWhole(call) ? JSON.stringify(JSON.parse(call.arguments), null, 2) : call.arguments;
}

/// The conversation as the API wants it. A call without a result is left out: no template could place it.
export function wireMessages(messages, system) {
  const answered = new Set(messages.filter(m => m.role === 'tool').map(m => m.id));
  const wire = system ? [{role: 'system', content: system}] : [];
  for (const m of messages) {
    if (m.role === 'user') {
      const images = (m.images || []).map(url => ({type: 'image_url', image_url: {url}}));
      wire.push({role: 'user', content: images.length ? [...images, {type: 'text', text: m.text}] : m.text});
    } else if (m.role === 'tool') {
      wire.push({role: 'tool', tool_call_id: m.id, content: m.text});
    } else {
      const calls = m.calls.filter(call => isWhole(call) && answered.has(call.id));
      if (!m.content && !m.reasoning && !calls.length) continue;
      const made = {role: 'assistant', content: m.content};
      if (m.reasoning) made.reasoning_content = m.reasoning;
      if (calls.length) {
        made.tool_calls = calls.map(c => ({id: c.id, type: 'function', function: {name: c.name, arguments: c.arguments}}));
      }
      wire.push(made);
    }
  }
  return wire;
}

function numberOf(settings, name, integer) {
  const text = String(settings[name] ?? '').trim();
  if (text === '') return undefined;
  const value = Number(text);
  if (!Number.isFinite(value) || (integer && !Number.isSafeInteger(value))) {
    throw new Error(`${name} is "${text}", not ${integer ? 'a whole' : 'a'} number; see Settings`);
  }
  return value;
}

function toolsOf(text) {
  if (!text || !text.trim()) return undefined;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (e) {
    throw new Error('the tools are no JSON: ' + e.message + '; see Settings');
  }
  if (!Array.isArray(tools)) throw new Error('the tools must be a JSON array of {"type": "function", …}; see Settings');
  return tools.length ? tools : undefined;
}

/// Body of POST /v1/chat/completions; what is left empty in the settings is the server's to choose. Throws on a bad setting.
export function requestBody(settings, model, messages) {
  const body = {model: model || undefined, messages: wireMessages(messages, (settings.system || '').trim()), stream: true,
    stream_options: {include_usage: true}};
  for (const name of ['temperature', 'top_p']) body[name] = numberOf(settings, name, false);
  for (const name of ['max_tokens', 'seed']) body[name] = numberOf(settings, name, true);
  if (settings.thinking === false) body.thinking = {type: 'disabled'};
  else if (settings.effort) body.reasoning_effort = settings.effort;
  body.tools = toolsOf(settings.tools);
  return body;
}

function messageOf(body) {
  const error = body && body.error;
  if (typeof error === 'string') return error;
  return error && typeof error.message === 'string' ? error.message : '';
}

/// The server's own words about a refused request.
export function refusal(status, text) {
  try {
    const message = messageOf(JSON.parse(text));
    if (message) return message;
  } catch (e) { /* no JSON: the status says enough */ }
  return 'the server answered with HTTP status ' + status;
}

/// Seconds until a request that was refused with 429 or 503 may come again; `retryAfter` is the header: seconds or a date.
export function retryDelay(status, retryAfter, now) {
  const text = (retryAfter || '').trim();
  let seconds = status === 429 ? 1 : 5;
  if (/^\d+$/.test(text)) seconds = Number(text);
  else if (text && !Number.isNaN(Date.parse(text))) seconds = Math.ceil((Date.parse(text) - now) / 1000);
  return Math.min(600, Math.max(1, seconds));
}

/// "41 in (32 cached) · 126 out · 38.2 tokens/s": usage of an answer whose first and last tokens came at these milliseconds.
export function figures(usage, firstMs, lastMs) {
  if (!usage) return '';
  const cached = usage.prompt_tokens_details && usage.prompt_tokens_details.cached_tokens;
  const parts = [usage.prompt_tokens + ' in' + (cached ? ` (${cached} cached)` : ''), usage.completion_tokens + ' out'];
  const seconds = (lastMs - firstMs) / 1000;
  if (usage.completion_tokens > 1 && seconds > 0) parts.push(((usage.completion_tokens - 1) / seconds).toFixed(1) + ' tokens/s');
  return parts.join(' · ');
}
